"""Beam search on the engine equals transformers' beam search: sequences and scores, in float32."""

from __future__ import annotations

import pytest
import torch

from paged_backend import LLM, SamplingParams
from paged_backend.errors import InvalidRequestError

PROMPTS = [[1, 5, 9], list(range(3, 40)), [7] * 16, [(11 * i) % 90 + 1 for i in range(33)]]


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def _expected(oracle, prompt: list[int], *, eos: int, width: int, count: int, max_tokens: int, **how) -> list:
    """(tokens, score) of transformers' best `count` outputs."""
    ids = torch.tensor([prompt])
    result = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=count,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=-1,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    sequences = [[t for t in row if t != -1] for row in result.sequences[:, len(prompt) :].tolist()]
    return list(zip(sequences, result.sequences_scores.tolist(), strict=True))


def _found(llm: LLM, prompt: list[int], **params) -> list:
    params = SamplingParams(temperature=0, use_beam_search=True, ignore_eos=True, **params)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert [item.index for item in output.outputs] == list(range(params.n))
    return [(item.token_ids, item.score) for item in output.outputs]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_equals_transformers(tiny_llama, oracle, length_penalty, early_stopping):
    how = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    with LLM(
        str(tiny_llama),
        skip_tokenizer_init=True,
        dtype="float32",
        num_kv_blocks=64,
        num_threads=1,
        check_integrity=True,
    ) as llm:
        for prompt in PROMPTS:
            # An end-of-sequence token that the search really meets: the greedy continuation's fourth token.
            greedy = llm.generate(
                {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
            )
            eos = greedy[0].outputs[0].token_ids[-1]
            for width, count, max_tokens in ((4, 4, 12), (3, 1, 20)):
                expected = _expected(oracle, prompt, eos=eos, width=width, count=count, max_tokens=max_tokens, **how)
                found = _found(
                    llm, prompt, n=count, beam_width=width, max_tokens=max_tokens, stop_token_ids=[eos], **how
                )
                assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
                assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        stats = llm.stats()
        assert stats["block_copies"] > 0
        assert stats["blocks_used"] == 0


def test_penalties_as_in_transformers(tiny_llama, oracle):
    with LLM(str(tiny_llama), skip_tokenizer_init=True, dtype="float32", num_kv_blocks=64, num_threads=1) as llm:
        for prompt in PROMPTS[:2]:
            expected = _expected(oracle, prompt, eos=0, width=4, count=4, max_tokens=12, repetition_penalty=1.3)
            found = _found(llm, prompt, n=4, beam_width=4, max_tokens=12, stop_token_ids=[0], repetition_penalty=1.3)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_beams_and_others_share_steps(tiny_llama):
    """A beam search among greedy neighbours, in a pool so small that all of them are preempted."""
    beam = SamplingParams(temperature=0, use_beam_search=True, n=3, beam_width=3, max_tokens=24, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = [beam, greedy, beam, greedy]
    outcomes = []
    for engine_args in (
        {"num_kv_blocks": 200},
        {"num_kv_blocks": 18, "preemption_mode": "recompute"},
        {"num_kv_blocks": 18, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_kv_blocks": 18, "preemption_mode": "swap", "swap_space": 0.01},
    ):
        with LLM(
            str(tiny_llama), skip_tokenizer_init=True, dtype="float32", block_size=8, num_threads=1,
            check_integrity=True, **engine_args,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outcomes.append([[item.token_ids for item in output.outputs] for output in outputs])
            assert (llm.stats()["preemptions"] > 0) == (engine_args["num_kv_blocks"] == 18)
            assert (llm.stats()["swaps_in"] > 0) == ("swap_space" in engine_args)
    assert outcomes[1:] == outcomes[:1] * 3


def test_what_a_beam_search_cannot_do_is_refused(tiny_llama):
    with pytest.raises(InvalidRequestError, match="`temperature`"):
        SamplingParams(use_beam_search=True, beam_width=2)
    with LLM(str(tiny_llama), skip_tokenizer_init=True, num_kv_blocks=8, max_num_seqs=4, num_threads=1) as llm:
        for name, params in (
            ("n", {"n": 5}),
            ("beam_width", {"use_beam_search": True, "beam_width": 5, "temperature": 0}),
        ):
            with pytest.raises(InvalidRequestError, match=f"`{name}` is 5, but at most 4"):
                llm.generate({"prompt_token_ids": [1]}, SamplingParams(**params), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="4 outputs side by side needs 9 KV blocks"):
            llm.generate({"prompt_token_ids": [1] * 18}, SamplingParams(n=4, max_tokens=20), use_tqdm=False)
