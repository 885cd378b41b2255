"""Through the server too, greedy tokens in float32 equal transformers', one stream at a time and all at once."""

from __future__ import annotations

import json
import shutil

import pytest
from server.client import GREEDY, ROOT, Call
from server.conftest import Launched

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    """The served repository in float32, whatever the hardware's own choice."""
    repository = tmp_path_factory.mktemp("float32") / "models"
    shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    path = repository / "paged_llm" / "1" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}))
    server = Launched(repository.parent / "log", f"--model-repository={repository}")
    try:
        server.wait_ready(timeout=240.0)
        yield server
    finally:
        code = server.stop()
    assert code == 0, server.output
    server.assert_gone()


def test_token_ids_equal_transformers(float32, greedy_prompts, greedy_expected):
    params = {**GREEDY, "max_tokens": len(greedy_expected[0])}
    calls = [
        Call(float32.grpc_url, "paged_llm", {"input_ids": prompt, "stream": True}, params) for prompt in greedy_prompts
    ]
    assert [call.wait().joined("output_ids") for call in calls] == greedy_expected
    for prompt, expected in zip(greedy_prompts[::5], greedy_expected[::5], strict=True):
        whole = Call(float32.grpc_url, "paged_llm", {"input_ids": prompt}, params).wait()
        assert whole.joined("output_ids") == expected
