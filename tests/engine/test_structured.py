"""Outputs of a given form: valid whatever the model would rather say, with n, preemption and streams; refusals."""

from __future__ import annotations

import json
import re
import threading

import jsonschema
import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.errors import InvalidRequestError
from paged_backend.model_source import DEMO_MODEL

EBNF = """
root ::= pair ("," pair){0,2}
pair ::= key "=" [0-9]+
key ::= "a" | "bc"
"""


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(str(text_model), dtype="float32", num_kv_blocks=64, num_threads=1, check_integrity=True) as made:
        yield made


def _params(form: dict, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 80, "structured_outputs": form, **options})


def _texts(llm: LLM, form: dict, **options) -> list[tuple[str, str]]:
    (output,) = llm.generate(["the cat"], _params(form, **options), use_tqdm=False)
    return [(item.text, item.finish_reason) for item in output.outputs]


FORMS = {
    "regex": {"regex": r"[a-c]{3}-\d{2,4}(x|yz)"},
    "choice": {"choice": ["yes", 'no "quoted"', "naïve\n"]},
    "ebnf": {"grammar": EBNF},
    "lark": {"grammar": 'start: "a"~2 ("b" | "c")'},
    "json": {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
}


def _fits(name: str, text: str) -> bool:
    if name == "choice":
        return text in FORMS["choice"]["choice"]
    if name == "json":
        return set(json.loads(text)) == {"a", "b"}
    patterns = {
        "regex": FORMS["regex"]["regex"],
        "ebnf": r"(a|bc)=\d+(,(a|bc)=\d+){0,2}",
        "lark": "aa[bc]",
    }
    return re.fullmatch(patterns[name], text) is not None


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n", [1, 3])
def test_forms(llm, name, n):
    texts = _texts(llm, FORMS[name], n=n)
    assert len(texts) == n
    ended = [text for text, reason in texts if reason == "stop"]
    assert ended or name in ("ebnf", "json")  # numbers may go on until the tokens run out
    assert all(_fits(name, text) for text in ended)


def test_greedy_and_sampled_and_free_rows_share_a_batch(llm):
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (alone,) = llm.generate(["the dog"], free, use_tqdm=False)
    forms = [_params(FORMS["regex"], seed=i, temperature=i % 2) for i in range(4)]
    outputs = llm.generate(["the cat", "the dog", "a", "b", "c"], [forms[0], free, *forms[1:]], use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids
    for output in (outputs[0], *outputs[2:]):
        assert _fits("regex", output.outputs[0].text)


def test_a_stream_joins_to_the_same_text(llm):
    engine = llm.engine
    ((text, _),) = _texts(llm, FORMS["regex"])
    engine.add_request(engine.make_request("r", "the cat", _params(FORMS["regex"])))
    deltas = []
    while engine.has_unfinished_requests():
        deltas += engine.step()
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas) > 3


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(text_model, llm, mode):
    prompts = ["the cat " * 5, "the dog " * 5]
    params = [_params({"regex": "[a-f]{60,70}"}, seed=i, max_tokens=75, n=1 + i) for i in range(2)]
    expected = [
        [item.text for item in llm.generate([prompt], each, use_tqdm=False)[0].outputs]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    arguments = {"num_kv_blocks": 14, "preemption_mode": mode, "swap_space": 0.01, "watermark": 0.0}
    with LLM(
        str(text_model), dtype="float32", num_threads=1, block_size=16, check_integrity=True, **arguments
    ) as tight:
        outputs = tight.generate(prompts, params, use_tqdm=False)
        assert tight.stats()["preemptions"] > 0
    assert [[item.text for item in output.outputs] for output in outputs] == expected


def test_an_output_ends_when_its_form_is_complete(llm):
    """Without an end-of-sequence token, and even if that is ignored."""
    for ignore in (False, True):
        (output,) = llm.generate(["x"], _params({"choice": ["abc"]}, ignore_eos=ignore), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")
        assert len(output.outputs[0].token_ids) == 3


def test_an_open_form_may_end_or_go_on(llm):
    end = {2: 100.0}
    assert _texts(llm, {"regex": "[0-9]+"}, logit_bias=end) == [(_texts(llm, {"regex": "[0-9]+"})[0][0][:1], "stop")]
    ((text, reason),) = _texts(llm, {"regex": "[0-9]+"}, logit_bias={2: -100.0}, max_tokens=9)
    assert (len(text), reason) == (9, "length")


def test_dead_ends_end_the_request_with_a_reason(llm):
    """The form wants a `q`, which is a bad word; its batch mate goes on."""
    params = [_params({"regex": "aq"}, bad_words=["q"]), _params(FORMS["regex"])]
    dead, fine = llm.generate(["x", "y"], params, use_tqdm=False)
    assert (dead.outputs[0].text, dead.outputs[0].finish_reason) == ("a", "error")
    assert dead.outputs[0].stop_reason
    assert _fits("regex", fine.outputs[0].text)
    assert llm.stats()["blocks_used"] == 0


def test_min_tokens_beyond_the_form_is_a_dead_end(llm):
    """The form allows nothing but the end, and the end may not come yet."""
    (output,) = llm.generate(["x"], _params({"regex": "(ab)?"}, logit_bias={2: 100}, min_tokens=3), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "stop")


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a|"},
        {"regex": "(?=a)b"},
        {"grammar": "root ::= missing"},
        {"grammar": 'start: "a" missing'},
        {"grammar": 'root ::= "a'},
        {"grammar": "(" * 5000},
        {"json": {"type": "strin"}},
        {"json": {"$ref": "http://example.com/schema"}},
        {"json": {"type": "string", "pattern": "(a"}},
        {"json": {"properties": {"a": 5}}},
    ],
    ids=lambda form: str(form)[:40],
)
def test_an_invalid_form_fails_only_its_request(llm, form):
    engine = llm.engine
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        engine.make_request("bad", "x", _params(form))
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 500
    assert _fits("regex", _texts(llm, FORMS["regex"])[0][0])


def test_compiling_does_not_hold_up_the_steps(text_model):
    """A request is made, form and all, on another thread than the one that steps."""
    config = EngineConfig(model=str(text_model), dtype="float32", num_kv_blocks=32, num_threads=1)
    engine = Engine(config)
    try:
        made = []
        form = {"json": {"enum": [f"value number {i}" for i in range(900)]}}
        maker = threading.Thread(target=lambda: made.append(engine.make_request("form", "x", _params(form))))
        engine.add_request(engine.make_request("free", "x", SamplingParams(max_tokens=100, ignore_eos=True)))
        maker.start()
        while engine.has_unfinished_requests():
            engine.step()
        maker.join()
        engine.add_request(made[0])
        deltas = []
        while engine.has_unfinished_requests():
            deltas += engine.step()
        assert json.loads("".join(delta.text for delta in deltas)).startswith("value number ")
    finally:
        engine.close()


# --- the demo model ---

_NAME = {"type": "string", "maxLength": 12}
_WHERE = {"type": "object", "properties": {"city": _NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
SCHEMAS = [
    {"type": "object", "properties": {"name": _NAME}, "required": ["name"]},
    {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}, "required": ["age"]},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    {"type": "object", "properties": {"none": {"type": "null"}}, "required": ["none"]},
    {"type": "object", "properties": {"x": {"type": "number", "minimum": -5, "maximum": 5}}, "required": ["x"]},
    {"type": "object", "properties": {"kind": {"enum": ["cat", "dog", 7, None, True]}}, "required": ["kind"]},
    {"type": "object", "properties": {"v": {"const": {"fixed": [1, 2]}}}, "required": ["v"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, _NAME], "items": False,
     "minItems": 2},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "integer", "minimum": 10, "maximum": 20},
    {"enum": ["red", "green", "blue"]},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    {"type": "object", "properties": {"at": _WHERE, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
     "required": ["at", "n"]},
    {"$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"],
                        "additionalProperties": False}},
     "type": "object", "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
     "required": ["l", "r"]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
]  # fmt: skip


def test_the_demo_model_writes_valid_json_for_twenty_schemas(demo_model):
    """All in one batch; some greedy, some sampled."""
    assert len(SCHEMAS) == 20
    params = [
        _params(
            {"json": schema, "disable_any_whitespace": True, "disable_additional_properties": True},
            temperature=i % 2,
            max_tokens=64,
        )
        for i, schema in enumerate(SCHEMAS)
    ]
    with LLM(DEMO_MODEL, num_kv_blocks=300, max_num_seqs=32) as llm:
        outputs = llm.generate(["JSON: "] * len(SCHEMAS), params, use_tqdm=False)
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        found = output.outputs[0]
        assert found.finish_reason == "stop", (schema, found)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(found.text), schema, format_checker=checker)
