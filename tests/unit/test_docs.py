"""The documentation against the code: engine arguments, what moves over from other backends, errors, alerts' advice,
and that links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from paged_backend import cli
from paged_backend.config import ALIASES, IGNORED, EngineConfig
from paged_backend.doctor.arguments import descriptions, reference
from paged_backend.sampling_params import SamplingParams
from paged_backend.triton_adapter import aliases, backend
from paged_backend.triton_adapter.aliases import ALIAS_INPUTS
from paged_backend.triton_adapter.settings import DRAIN_VARIABLE, MODEL_VARIABLE, ServingSettings
from paged_backend.triton_adapter.tensors import LLM_INPUTS, LLM_OUTPUTS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DEPLOYMENT = (DOCS / "deployment.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_page_of_engine_arguments_is_what_the_command_prints(capsys):
    assert cli.main(["engine-arguments"]) == 0
    printed = capsys.readouterr().out
    written = (DOCS / "engine_arguments.md").read_text()
    assert printed == written, "run: paged-backend engine-arguments > docs/engine_arguments.md"


@pytest.mark.parametrize("settings", [EngineConfig, ServingSettings])
def test_every_argument_is_described(settings):
    fields = {field.name for field in dataclasses.fields(settings)}
    assert set(descriptions(settings)) == fields
    assert all(f"| `{name}` |" in reference() for name in fields)


def test_the_environment_is_described():
    assert MODEL_VARIABLE in reference()
    assert DRAIN_VARIABLE in reference()


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table in deployment.md whose first column has this heading."""
    table = DEPLOYMENT.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_alias_table_is_the_code():
    rows = {_names(name)[0]: (kind, _names(meaning)) for name, kind, meaning in _rows("TensorRT-LLM's tensor")}
    assert {name: kind for name, (kind, _) in rows.items()} == {
        spec.name: spec.data_type.removeprefix("TYPE_") for spec in ALIAS_INPUTS
    }
    parameters = {field.name for field in dataclasses.fields(SamplingParams)}
    for alias in aliases._NAMES:
        assert rows[alias.tensor][1][0] == alias.parameter
        assert set(rows[alias.tensor][1]) <= parameters
    assert set(rows[aliases.RETURN_LOG_PROBS][1]) <= {spec.name for spec in LLM_OUTPUTS}


def test_the_vllm_table_is_the_code():
    rows = _rows("vLLM backend")
    (ignored,) = [_names(name) for name, here in rows if here == "accepted, without effect"]
    assert set(ignored) == IGNORED
    renamed = {name: _names(here)[-1] for cell, here in rows for name in _names(cell) if name in ALIASES}
    assert renamed == ALIASES
    (switch,) = [_names(here)[0] for name, here in rows if name.startswith("numbers as strings")]
    assert switch == backend._ALIASES_PARAMETER


# As the vLLM backend declares them in its `auto_complete_config`, but for what the table says is refused.
VLLM_INPUTS = {
    **dict.fromkeys(("text_input", "sampling_parameters"), "TYPE_STRING"),
    **dict.fromkeys(("stream", "exclude_input_in_output", "return_finish_reason"), "TYPE_BOOL"),
    **dict.fromkeys(("return_cumulative_logprob", "return_logprobs"), "TYPE_BOOL"),
    **dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), "TYPE_BOOL"),
}
VLLM_OUTPUTS = {
    **dict.fromkeys(("text_output", "finish_reason", "logprobs"), ("TYPE_STRING", [-1])),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}


def test_the_vllm_backends_tensors_are_all_here():
    inputs = {spec.name: spec for spec in LLM_INPUTS}
    for name, data_type in VLLM_INPUTS.items():
        assert (inputs[name].data_type, inputs[name].dims, inputs[name].optional) == (data_type, [1], True)
    outputs = {spec.name: (spec.data_type, spec.dims) for spec in LLM_OUTPUTS}
    assert {name: outputs[name] for name in VLLM_OUTPUTS} == VLLM_OUTPUTS


def test_every_output_that_has_to_be_asked_for_is_described():
    rows = {_names(name)[0]: _names(meaning)[0] for name, meaning in _rows("input")}
    asked = [spec.name for spec in LLM_INPUTS if spec.name.startswith("return_")]
    assert sorted(rows) == sorted(asked)
    assert all(f"return_{output}" == name for name, output in rows.items())
    assert set(rows.values()) <= {spec.name for spec in LLM_OUTPUTS}


def test_the_texts_that_tell_errors_apart_are_the_codes():
    """Those of the server's own queue policy are tested with the server."""
    sources = "".join(path.read_text() for path in (ROOT / "paged_backend").rglob("*.py"))
    texts = [text for cell, *_ in _rows("the text contains") if cell.startswith("`") for text in _names(cell)]
    own = [text for text in texts if text not in ("Exceeds maximum queue size", "Request timeout expired")]
    assert len(texts) - len(own) == 2
    assert len(own) == 4
    assert all(text in sources for text in own)


def test_the_ensemble_passes_every_alias_on():
    config = (ROOT / "model_repository" / "paged_ensemble" / "config.pbtxt").read_text()
    for spec in ALIAS_INPUTS:
        assert (
            f'{{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {spec.dims[0]} ] optional: true }}' in config
        )
        assert f'input_map {{ key: "{spec.name}" value: "{spec.name}" }}' in config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_what_the_rules_advise_exists():
    rules = (DOCS / "monitoring" / "rules.yml").read_text()
    for page, heading in re.findall(r'(docs/\S+\.md), "([^"]+)"', rules):
        assert f"## {heading}" in (ROOT / page).read_text()
    for name in ("max_waiting_requests", "max_num_seqs", "swap_space"):
        assert name in rules
        assert name in descriptions(EngineConfig)
