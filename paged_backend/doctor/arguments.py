"""`paged-backend engine-arguments`: the reference of everything `model.json` may hold, made from the code's docstrings.

docs/engine_arguments.md is its output; a test compares them. Knows dataclasses with an `Args:` section, no meanings.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any

from paged_backend.config import ALIASES, IGNORED, EngineConfig
from paged_backend.triton_adapter.settings import ServingSettings

_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")
_INTRODUCTION = """# Engine arguments

What a model's `<version>/model.json` may hold: a JSON object with any of these names. Unknown names and values out of
bounds are refused when the model loads, with the name of the argument at fault. Names are vLLM's where vLLM has the
argument. `paged-backend doctor` checks a file without loading the model; sampling parameters are a page of their own.

This page is what `paged-backend engine-arguments` prints.
"""
_SURROUNDINGS = """## Outside model.json

| where | name | meaning |
|---|---|---|
| environment | `PAGED_BACKEND_MODEL` | replaces `model` in every model.json; set by `serve --model` |
| environment | `PAGED_BACKEND_DRAIN_SECONDS` | how long requests in flight may go on when the server stops or the \
model is unloaded (5); set by `serve --drain-seconds` |
| config.pbtxt | `instance_group` | `KIND_MODEL`: the argument `device` decides; `KIND_CPU`; `KIND_GPU`: the GPU the \
server assigns, one engine for each; `count` must be 1 |
| config.pbtxt | `dynamic_batching` | only its queue policies matter, and only with `when_full` set to `block` |
| config.pbtxt | parameter `tensorrt_llm_inputs` | `false` leaves TensorRT-LLM's input tensors out (see deployment.md) |
| config.pbtxt | parameter `engine_model` | of tokenizer and detokenizer models: the engine model they stand beside |
"""


def add_arguments_page(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser("engine-arguments", help="print the reference of model.json", description=__doc__)
    parser.set_defaults(run=_run)


def reference() -> str:
    """The page, in Markdown."""
    aliases = "".join(f"| `{alias}` | the same as `{name}` |\n" for alias, name in sorted(ALIASES.items()))
    ignored = "".join(f"| `{name}` | accepted, without effect |\n" for name in sorted(IGNORED))
    return "\n".join(
        [
            _INTRODUCTION,
            "## Engine\n",
            _table(EngineConfig),
            "## Serving\n",
            _table(ServingSettings),
            "## Other names\n",
            "| name | meaning |\n|---|---|\n" + aliases + ignored,
            _SURROUNDINGS,
        ]
    )


def descriptions(dataclass: type) -> dict[str, str]:
    """What the `Args:` section of its docstring says of each field."""
    section = (inspect.getdoc(dataclass) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        match = _ENTRY.match(line)
        if match:
            names = match[1].split(", ")
            found.update(dict.fromkeys(names, match[2]))
        else:
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found


def _table(dataclass: type) -> str:
    said = descriptions(dataclass)
    rows = ["| argument | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(dataclass):
        kind = str(field.type).replace(" | None", " or null").replace("|", "or")
        default = "null" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        meaning = said[field.name].replace("|", "\\|").replace("None", "null")
        rows.append(f"| `{field.name}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(rows) + "\n"


def _run(_: argparse.Namespace) -> int:
    print(reference(), end="")
    return 0
