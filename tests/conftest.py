"""Fixtures shared by all tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers import make_text_model, make_tiny_model
from hypothesis import settings

from paged_backend.errors import ConfigError
from paged_backend.model_source import DEMO_MODEL, resolve_model

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 200, 350, 700)
NEW_TOKENS = 12
TEXT = (
    "Paris is the capital of France and lies on the river Seine. Water boils at one hundred degrees. The quick brown "
    "fox jumps over the lazy dog while 12 engineers count 345 blocks of memory in a café: “paged attention” works."
)
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; skips where its package is not installed."""
    try:
        return resolve_model(DEMO_MODEL).path
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_oracle(demo_model):
    """The demo model as transformers reads it, in float32 (its GGUF reader takes long: once per session)."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Makes (once per session) and returns the directory of a model named in `helpers.TINY_MODELS`."""
    directory = tmp_path_factory.mktemp("tiny_models")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(name, directory)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model) -> Path:
    """Directory of a tiny random Llama: untied head, grouped queries."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> Path:
    """Directory of a tiny random Llama that has a tokenizer (see `helpers.make_text_model`)."""
    return make_text_model(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="session")
def greedy_prompts() -> list[list[int]]:
    """Sixteen prompts of 1 to 700 tokens, as ids."""
    from paged_backend.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(DEMO_MODEL))
    rng = random.Random(7)
    made = []
    for length in LENGTHS:
        token_ids = tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(length + 8)))
        assert len(token_ids) >= length
        made.append(token_ids[:length])
    return made


@pytest.fixture(scope="session")
def greedy_expected(greedy_prompts, demo_oracle) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone."""
    import torch

    outputs = []
    torch.set_num_threads(1)
    for prompt in greedy_prompts:
        ids = torch.tensor([prompt])
        result = demo_oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs
