"""Streams of 1, 2, 3 and 8 tokens a response: each holds as many as it should, and all of them join to the same text.

Four engine models, each with another `stream_interval`, and an ensemble around each. Their tokenizer has a token per
byte, so that responses begin and end inside characters; a form makes the random model write the text under test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.client import GREEDY, ROOT, Answer, Call
from server.conftest import Launched, serving

from paged_backend.model_source import resolve_model
from paged_backend.tokenizer import Tokenizer

pytestmark = pytest.mark.server

INTERVALS = (1, 2, 3, 8)
TEXTS = (
    "🌶读ส한",
    "Café 123 😊",
    "naïve 読む สวัสดี 한국어, e\u0301 and the 👩‍👩‍👧‍👦 in 12",
    "Ünïcödé: Ελληνικά, русский, עברית, हिन्दी",
)
PROMPT = "Say the words:"
# Each delta is sent before the next step begins. Else two that pile up would merge, and sizes depend on the machine.
MODEL = """
from paged_backend.triton_adapter.backend import LLMModel

class TritonPythonModel(LLMModel):
    def initialize(self, args):
        super().initialize(args)
        self._sender.schedule = lambda stream: stream.flush()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Iterator[Launched]:
    """`llm_N` and `ensemble_N` for each interval N; they share the tokenizer and the detokenizer."""
    repository = tmp_path_factory.mktemp("pieces") / "models"
    source = ROOT / "model_repository"
    for name in ("tokenizer", "detokenizer"):
        shutil.copytree(source / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        config = (source / name / "config.pbtxt").read_text()
        (repository / name / "config.pbtxt").write_text(config.replace('"paged_llm"', '"llm_1"'))
    arguments = {"model": str(text_model), "num_kv_blocks": 64, "num_threads": 1, "dtype": "float32"}
    for interval in INTERVALS:
        engine, ensemble = (repository / f"{kind}_{interval}" for kind in ("llm", "ensemble"))
        (engine / "1").mkdir(parents=True)
        shutil.copy(source / "paged_llm" / "config.pbtxt", engine)
        (engine / "1" / "model.json").write_text(json.dumps({**arguments, "stream_interval": interval}))
        (engine / "1" / "model.py").write_text(MODEL)
        (ensemble / "1").mkdir(parents=True)
        config = (source / "paged_ensemble" / "config.pbtxt").read_text()
        (ensemble / "config.pbtxt").write_text(config.replace('"paged_llm"', f'"llm_{interval}"'))
    with serving(repository.parent / "log", f"--model-repository={repository}") as launched:
        yield launched


@pytest.fixture(scope="module")
def tokenizer(text_model: Path) -> Tokenizer:
    return Tokenizer.load(resolve_model(str(text_model)))


def _ask(server: Launched, model: str, params: dict[str, Any], **inputs: Any) -> Answer:
    given = {"text_input": PROMPT, "exclude_input_in_output": True, "return_num_output_tokens": True, **inputs}
    if inputs.get("stream"):
        del given["exclude_input_in_output"]
    if "input_ids" in inputs:
        del given["text_input"]
    answer = Call(server.grpc_url, model, given, params).wait()
    assert answer.error is None, answer.error
    assert answer.finals == 1
    return answer


def _text_sizes(tokenizer: Tokenizer, ids: list[int], interval: int) -> list[int]:
    """How many tokens each response of a text stream holds, by decoding every beginning of the output anew.

    A response is due once it has a character to show and, after the first, `interval` tokens.
    """
    sizes: list[int] = []
    sent = shown = 0
    for end in range(1, len(ids) + 1):
        complete = len(tokenizer.decode(ids[:end]).rstrip("\ufffd"))
        if end == len(ids) or (complete > shown and end - sent >= (interval if sizes else 1)):
            sizes.append(end - sent)
            sent, shown = end, complete
    return sizes


def _token_sizes(count: int, interval: int) -> list[int]:
    """The same of a stream of ids: one, then `interval` each, then the rest."""
    sizes = [1, *[interval] * ((count - 1) // interval)]
    rest = count - sum(sizes)
    return [*sizes, rest] if rest else sizes


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_response_holds_its_tokens_and_all_join_to_the_text(
    server: Launched, tokenizer: Tokenizer, interval: int, text: str
) -> None:
    engine, ensemble = f"llm_{interval}", f"ensemble_{interval}"
    params = {**GREEDY, "max_tokens": 200, "structured_outputs": {"choice": [text]}}
    prompt = tokenizer.encode(PROMPT)
    ids = _ask(server, engine, params, input_ids=prompt).joined("output_ids")
    assert tokenizer.decode(ids) == text
    assert len(ids) > 12, "too few tokens to show anything"

    tokens = _ask(server, engine, params, input_ids=prompt, stream=True)
    assert tokens.joined("output_ids") == ids
    assert tokens.joined("num_output_tokens") == _token_sizes(len(ids), interval)
    for model in (engine, ensemble):
        whole = _ask(server, model, params)
        assert whole.text == text
        assert whole.joined("num_output_tokens") == [len(ids)]
        stream = _ask(server, model, params, stream=True)
        assert stream.text == text
        assert stream.joined("num_output_tokens") == _text_sizes(tokenizer, ids, interval)
        assert not any("\ufffd" in piece for piece in stream.texts)


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_no_text_join_too(server: Launched, tokenizer: Tokenizer, interval: int, seed: int) -> None:
    """Left to itself the random model writes bytes that decode to replacement characters, here and there."""
    params = {"temperature": 1.5, "seed": seed, "max_tokens": 40, "ignore_eos": True}
    ids = _ask(server, f"llm_{interval}", params, input_ids=tokenizer.encode(PROMPT)).joined("output_ids")
    wanted = tokenizer.decode(ids)
    assert "\ufffd" in wanted
    for model in (f"llm_{interval}", f"ensemble_{interval}"):
        assert _ask(server, model, params).text == wanted
        stream = _ask(server, model, params, stream=True)
        assert stream.text == wanted
        sizes = stream.joined("num_output_tokens")
        assert sum(sizes) == 40
        assert all(size >= interval for size in sizes[1:-1])
