"""The whole engine on the Triton-lang kernels, interpreted, generates what it generates on the numba ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# In a process of its own: Triton-lang decides at import whether its kernels are interpreted.
SCRIPT = """
import json, sys
from paged_backend import LLM, SamplingParams

lengths = (1, 9, 16, 37)
prompts = [{"prompt_token_ids": [(7 * i + j) % 90 + 1 for j in range(n)]} for i, n in enumerate(lengths)]
params = [SamplingParams(max_tokens=6, ignore_eos=True, **how) for how in ({"temperature": 0}, {"seed": 3})]
for backend in ("cpu", "triton", "reference"):
    with LLM(
        sys.argv[1], skip_tokenizer_init=True, dtype="float32", block_size=8, num_kv_blocks=9,
        max_num_batched_tokens=24, attention_backend=backend, num_threads=1, check_integrity=True,
    ) as llm:
        outputs = [llm.generate(prompts, p, use_tqdm=False) for p in params]
        assert llm.engine.config.attention_backend == backend
        assert llm.stats()["preemptions"] > 0
        print(json.dumps([[o.outputs[0].token_ids for o in group] for group in outputs]))
"""


def test_triton_lang_equals_numba_equals_reference(tiny_llama):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tiny_llama)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    numba, triton, reference = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    assert [len(token_ids) for group in numba for token_ids in group] == [6] * 8
    assert triton == numba == reference
