"""The compiler of forms: what it keeps, what it refuses, how long it may take, and masks that say the truth."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from paged_backend.errors import InvalidRequestError
from paged_backend.model_source import resolve_model
from paged_backend.structured.compiler import GrammarCompiler
from paged_backend.structured.grammars import grammar_text
from paged_backend.structured_params import StructuredOutputs
from paged_backend.tokenizer import Tokenizer

VOCABULARY = 288
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(text_model) -> Tokenizer:
    return Tokenizer.load(resolve_model(str(text_model)))


@pytest.fixture
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, VOCABULARY, [EOS], timeout_s=5.0)
    yield made
    made.close()


def _allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def test_masks_follow_the_form(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(regex="a(b|the)c*")).start()
    (a, b, c, the) = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b", "c", "the"))
    (t, th) = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("t", "th"))
    assert _allowed(state.mask()) == {a}
    state.accept(a)
    # Tokens of several characters count, as far as they fit.
    assert _allowed(state.mask()) == {b, t, th, the}
    state.accept(the)
    assert _allowed(state.mask()) == {c, EOS}
    assert not state.is_complete
    state.accept(EOS)
    assert state.is_complete
    assert state.error is None


def test_the_schema_true_is_any_value(compiler, tokenizer):
    anything = compiler.compile(StructuredOutputs(json=True))
    assert anything is compiler.compile(StructuredOutputs(json="{}"))
    state = anything.start()
    state.accept(tokenizer.encode("3", add_special_tokens=False)[0])
    assert state.error is None


@pytest.mark.parametrize("schema", [False, "false"])
def test_the_schema_false_is_refused(schema):
    with pytest.raises(InvalidRequestError, match=r"`structured_outputs\.json`"):
        StructuredOutputs(json=schema)


SURROGATE = "a\ud800"


@pytest.mark.parametrize("form", [
    {"regex": SURROGATE}, {"choice": [SURROGATE]}, {"grammar": f'root ::= "{SURROGATE}"'},
    {"json": {"const": SURROGATE}}, {"json": {"type": 5}}, {"json": {"$ref": 3}},
    {"regex": "("}, {"json": {"type": "object"}, "whitespace_pattern": "("},
])  # fmt: skip
def test_whatever_the_library_raises_is_the_forms_error(compiler, form):
    with pytest.raises(InvalidRequestError, match="`structured_outputs` cannot be compiled") as info:
        compiler.compile(StructuredOutputs(**form))
    assert info.value.field == "structured_outputs"


def test_any_object(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(json_object=True, disable_any_whitespace=True)).start()
    assert _allowed(state.mask()) == set(tokenizer.encode("{", add_special_tokens=False))
    for token_id in tokenizer.encode('{"a":[1,null,{"b":"é"}]}', add_special_tokens=False):
        assert token_id in _allowed(state.mask())
        state.accept(token_id)
    assert state.is_complete


def test_a_token_that_leaves_the_form(compiler):
    state = compiler.compile(StructuredOutputs(choice=["abc"])).start()
    state.accept(100)
    assert state.error
    assert not state.is_complete
    assert _allowed(state.mask()) == set()


def test_states_are_each_on_their_own(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(choice=["ab", "ac"]))
    first, second = grammar.start(), grammar.start()
    before = second.mask()
    for token_id in tokenizer.encode("ab", add_special_tokens=False):
        first.accept(token_id)
    assert first.is_complete
    assert second.mask() == before == grammar.start().mask()


def test_equal_forms_are_compiled_once(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = compiler.compile(StructuredOutputs(json=schema))
    assert compiler.compile(StructuredOutputs(json='{"type":"object", "properties":{"a":{"type":"integer"}}}')) is first
    assert compiler.compile(StructuredOutputs(json=schema, disable_any_whitespace=True)) is not first


def test_only_so_many_are_kept(compiler):
    first = compiler.compile(StructuredOutputs(regex="a{1}"))
    for count in range(2, 70):
        compiler.compile(StructuredOutputs(regex=f"a{{{count}}}"))
    assert len(compiler._made) == 64
    assert compiler.compile(StructuredOutputs(regex="a{1}")) is not first


def test_many_threads_get_the_same(compiler):
    wanted = StructuredOutputs(json={"enum": [f"entry {i}" for i in range(500)]})
    made = []
    threads = [threading.Thread(target=lambda: made.append(compiler.compile(wanted))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(map(id, made))) == 1


def test_compiling_takes_only_so_long(tokenizer, monkeypatch):
    """The request is given up; what its thread finds later serves others."""
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [EOS], timeout_s=0.05)
    release = threading.Event()
    really = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda text: (release.wait(20), really(text))[1])
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"grammar_timeout_s"):
        compiler.compile(StructuredOutputs(regex="abc"))
    assert time.monotonic() - started < 10
    release.set()
    compiler._timeout_s = 20.0
    assert compiler.compile(StructuredOutputs(regex="abc")).start().mask()
    compiler.close()


HOSTILE = {
    "many states": StructuredOutputs(regex="(.*a.{60}){30}"),
    "many repetitions": StructuredOutputs(regex="((a{1,1000}){1,1000}){1,1000}"),
    "many rules": StructuredOutputs(grammar="\n".join(f"r{i} ::= r{i + 1}" for i in range(4000))),
    "deep schema": StructuredOutputs(json='{"items": ' * 900 + "{}" + "}" * 900, disable_additional_properties=True),
    "large schema": StructuredOutputs(
        json={"type": "object", "properties": {f"p{i}": {"pattern": "^a{1,200}b$"} for i in range(800)}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_end_in_bounded_time(compiler, tokenizer, name):
    """They compile or are refused, and so are their masks, within a time that a server can bear."""
    started = time.monotonic()
    with contextlib.suppress(InvalidRequestError):
        state = compiler.compile(HOSTILE[name]).start()
        for token_id in tokenizer.encode("a" * 40, add_special_tokens=False):
            state.mask()
            state.accept(token_id)
    assert time.monotonic() - started < 30


def test_closed_objects():
    leaf = {"properties": {"x": {}}}
    schema = {
        "properties": {"a": {"items": [leaf]}, "b": {"allOf": [leaf]}, "c": {**leaf, "additionalProperties": True}}
    }
    text = grammar_text(StructuredOutputs(json=schema, disable_additional_properties=True))
    assert text.count('"additionalProperties":false') == 2
    assert text.count('"additionalProperties":true') == 1


def test_a_model_without_an_end_of_sequence_token(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [], timeout_s=5.0)
    state = compiler.compile(StructuredOutputs(choice=["a"])).start()
    state.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert state.is_complete
    compiler.close()
