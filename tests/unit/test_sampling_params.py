"""Sampling parameters check themselves: types, bounds, contradictions, names; messages stay short whatever is sent."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from paged_backend.config import EngineConfig
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.structured_params import StructuredOutputs

HUGE = [10**5000, "x" * 10**6, ["y"] * 10**5, {"k" * 10**5: 1}, [10**5000]]
BAD = [
    *[("min_tokens", v) for v in (-1, 1.0, "2", True, None)],
    *[("prompt_logprobs", v) for v in (-1, 1.5, "2", True)],
    *[("logprobs", v) for v in (-1, 1.5, "2", True)],
    *[("truncate_prompt_tokens", v) for v in (0, -2, 1.0, "4")],
    *[("logit_bias", v) for v in ([1], "1", {"a": 1}, {-1: 1}, {1: "x"}, {1: math.nan}, {1: math.inf}, {True: 1})],
    *[("logit_bias", v) for v in ({"1": 1, 1: 2}, {1.5: 1}, {1: None}, {1: 10**400}, {"1" * 30: 1}, {"²": 1})],
    *[("allowed_token_ids", v) for v in ([], 5, ["a"], [1.0], [-1], [True], "12")],
    *[("bad_words", v) for v in ("word", [""], [1], 5, {"a": 1})],
    *[("spaces_between_special_tokens", v) for v in (0, "true", None)],
    *[("detokenize", v) for v in (1, None)],
    *[("output_kind", v) for v in ("all", 0, None, ["delta"])],
    *[("structured_outputs", v) for v in ("json", [], {}, 5, {"regex": "a", "choice": ["b"]}, {"json_object": False})],
    *[("cache_salt", v) for v in ("", 5)],
    *[("n", v) for v in (0, -1, 1.0, None)],
    *[("priority", v) for v in (2**31, 0.5)],
    *[(name, value) for name in ("seed", "stop", "temperature", "top_k", "logit_bias", "cache_salt") for value in HUGE
      if not (name == "cache_salt" and isinstance(value, str))
      and not (name == "stop" and isinstance(value, (str, list)) and value != [10**5000])
      and not (name == "top_k" and value == 10**5000)],
]  # fmt: skip


def _name(value: object) -> str:
    return str(type(value).__name__) if any(value is huge for huge in HUGE) else repr(value)[:30]


@pytest.mark.parametrize(("name", "value"), BAD, ids=_name)
def test_refused_by_name_in_few_words(name, value):
    with pytest.raises(InvalidRequestError, match=f"`{name}`") as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"grammar": ["a"]}, "structured_outputs.grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json": {"a": math.nan}}, "structured_outputs.json"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json_object": True, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
        ({"rgex": "a"}, "structured_outputs.rgex"),
    ],
)
def test_forms_are_refused_by_name(value, field):
    with pytest.raises(InvalidRequestError, match=f"`{re.escape(field)}`") as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.field == field


def test_forms():
    assert SamplingParams(structured_outputs={"regex": "a+"}).structure == StructuredOutputs(regex="a+")
    schema = {"type": "object"}
    by_text = SamplingParams.from_mapping({"guided_decoding": {"json": json.dumps(schema), "backend": "auto"}})
    assert by_text.structure == SamplingParams(structured_outputs={"json": schema}).structure
    assert SamplingParams(structured_outputs=StructuredOutputs(choice=["é", "b"])).structure.size == 2
    with pytest.raises(UnsupportedError, match="structural_tag"):
        SamplingParams(structured_outputs={"structural_tag": "{}"})
    with pytest.raises(InvalidRequestError, match=r"did you mean `structured_outputs\.regex`"):
        SamplingParams(structured_outputs={"rgex": "a"})
    with pytest.raises(InvalidRequestError, match="given twice"):
        SamplingParams.from_mapping({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}})


def test_contradictions():
    with pytest.raises(InvalidRequestError, match="`min_tokens`"):
        SamplingParams(min_tokens=17)
    SamplingParams(min_tokens=17, max_tokens=None)
    with pytest.raises(InvalidRequestError, match="`stop` is matched against text"):
        SamplingParams(stop="a", detokenize=False)


NOT_IN_BEAM_SEARCH = {"stop": "a", "logprobs": 1, "prompt_logprobs": 0, "min_tokens": 1, "logit_bias": {1: 1}}
NOT_IN_BEAM_SEARCH |= {"allowed_token_ids": [1], "bad_words": ["a"], "structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize("name", NOT_IN_BEAM_SEARCH)
def test_what_a_beam_search_does_not_do(name):
    with pytest.raises(InvalidRequestError, match=f"`{name}` is not supported in a beam search"):
        SamplingParams(use_beam_search=True, temperature=0, **{name: NOT_IN_BEAM_SEARCH[name]})


def test_inner_forms_survive_a_copy():
    params = SamplingParams(
        stop="a", logit_bias={"7": 1, 3: -2}, bad_words=["b"], allowed_token_ids=[7], structured_outputs={"regex": "a"}
    )
    assert (params.stop_strings, params.biases) == (("a",), ((3, -2.0), (7, 1.0)))
    assert dataclasses.replace(params) == params


def test_unknown_names():
    for wrong, right in (("max_token", "max_tokens"), ("logit_biases", "logit_bias"), ("guided_decode", "guided_dec")):
        with pytest.raises(InvalidRequestError, match=f"did you mean `{right}"):
            SamplingParams.from_mapping({wrong: 1})
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_mapping({"z" * 10**6: 1})
    assert len(str(caught.value)) < 1000
    assert len(caught.value.field) < 100


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12, 5e-324])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


# --- the reference page ---

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling_parameters.md"


def _rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading: cells by the name in the first one."""
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows}


def _default(field: dataclasses.Field) -> str:
    return f"`{json.dumps(field.default)}`"


def test_the_page_lists_every_parameter_with_its_default():
    rows = _rows("Parameters")
    assert list(rows) == [field.name for field in dataclasses.fields(SamplingParams)]
    for field in dataclasses.fields(SamplingParams):
        assert rows[field.name][1] == _default(field), field.name
        assert all(rows[field.name]), field.name


def test_the_page_lists_every_form_and_every_limit():
    assert list(_rows("Structured outputs")) == [field.name for field in dataclasses.fields(StructuredOutputs)]
    limits = _rows("Limits of the server")
    for name, cells in limits.items():
        assert cells[0] == f"`{json.dumps(getattr(EngineConfig(), name))}`"
    named = set(re.findall(r"\((max_[a-z_]+|grammar_timeout_s)\)", _sources()))
    assert set(limits) == named - {"max_num_seqs", "max_model_len", "max_waiting_requests"}


def _sources() -> str:
    root = PAGE.parents[1] / "paged_backend"
    paths = (root / "engine" / "params_check.py", root / "structured" / "compiler.py")
    return "\n".join(re.sub(r', "(max_\w+)"\)', r"(\1)", path.read_text()) for path in paths)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_the_bounds_on_the_page_are_the_codes(name):
    """Each row ends with values that are refused, as JSON; the page's word is tried."""
    refused = _rows("Parameters")[name][-1]
    values = [json.loads(text) for text in re.findall(r"`([^`]+)`", refused)]
    assert values, name
    for value in values:
        with pytest.raises(InvalidRequestError, match=f"`{name}`"):
            SamplingParams.from_mapping({name: value})
