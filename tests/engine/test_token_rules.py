"""Rules about single tokens, prompt log-probabilities and text options, through the whole engine on a tiny model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.errors import InvalidRequestError, ModelLoadError, UnsupportedError

EOS = 2
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(str(text_model), dtype="float32", num_kv_blocks=64, num_threads=1, check_integrity=True) as made:
        yield made


def _one(llm: LLM, prompt="the cat and the dog", **params):
    (output,) = llm.generate([prompt], SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return output.outputs[0]


def test_end_of_sequence_waits_for_min_tokens(llm):
    output = _one(llm, logit_bias={EOS: 100.0}, min_tokens=4)
    assert len(output.token_ids) == 5
    assert output.token_ids[4] == EOS
    assert EOS not in output.token_ids[:4]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert _one(llm, logit_bias={EOS: 100.0}).token_ids == [EOS]


def test_stop_tokens_wait_for_min_tokens_too(llm):
    token = _one(llm, ignore_eos=True).token_ids[0]
    assert _one(llm, stop_token_ids=[token]).token_ids == [token]
    output = _one(llm, stop_token_ids=[token], min_tokens=3, ignore_eos=True)
    assert token not in output.token_ids[:3]


def test_stop_strings_wait_for_min_tokens(llm):
    """Text of the first tokens is not matched at all."""
    ascii_only = {"allowed_token_ids": list(range(36, 130)), "max_tokens": 20}
    text = _one(llm, **ascii_only).text
    stop = text[2:4]
    assert _one(llm, stop=stop, **ascii_only).text == text[: text.index(stop)]
    later = _one(llm, stop=stop, min_tokens=6, **ascii_only)
    assert later.text.startswith(text[:6])


def test_min_tokens_with_ignore_eos_bans_nothing(llm):
    """As in vLLM: who ignores the end-of-sequence token may see it."""
    assert _one(llm, logit_bias={EOS: 100.0}, min_tokens=4, ignore_eos=True).token_ids == [EOS] * 12


@pytest.mark.parametrize("temperature", [0, 2.0])
def test_allowed_tokens_and_bias(llm, temperature):
    allowed = [40, 41, 99]
    output = _one(llm, allowed_token_ids=allowed, temperature=temperature, seed=1, max_tokens=30)
    assert set(output.token_ids) <= set(allowed)
    assert _one(llm, logit_bias={"77": 200}, max_tokens=3).token_ids == [77] * 3


def test_bad_words_with_and_without_the_space(llm):
    tokenizer = llm.engine.tokenizer
    word = [tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the")]
    assert all(len(ids) == 1 for ids in word)
    wanted = {word[0][0]: 50.0, word[1][0]: 40.0}
    assert _one(llm, logit_bias=wanted).token_ids == word[0] * 12
    output = _one(llm, logit_bias=wanted, bad_words=["the"])
    assert not {word[0][0], word[1][0]} & set(output.token_ids)


def test_a_bad_word_of_several_tokens(llm):
    (a, b) = llm.engine.tokenizer.encode("zq", add_special_tokens=False)
    output = _one(llm, allowed_token_ids=[a, b], logit_bias={a: 5}, bad_words=["zq"], temperature=2.0, max_tokens=60)
    assert "zq" not in output.text
    assert "q" in output.text or "z" in output.text


def test_logprobs_are_raw_whatever_the_rules(llm):
    """Log-probabilities of the first token do not depend on what shaped the choice of it."""
    free = _one(llm, logprobs=5, max_tokens=1)
    ruled = _one(llm, logprobs=5, max_tokens=1, allowed_token_ids=[40, 41], logit_bias={41: 9}, repetition_penalty=2.0)
    best, still_best = ({i: p for i, p in out.logprobs[0].items() if p.rank <= 5} for out in (free, ruled))
    assert best == still_best
    assert ruled.logprobs[0][ruled.token_ids[0]].rank > 5


def test_rules_leave_the_others_of_the_batch_alone(llm):
    plain = SamplingParams(**GREEDY, ignore_eos=True)
    seeded = SamplingParams(temperature=1.5, seed=3, top_k=400, max_tokens=12, ignore_eos=True)
    ruled = SamplingParams(**GREEDY, allowed_token_ids=[50], logit_bias={50: 3}, min_tokens=2, bad_words=["x"])
    alone = [_one(llm, max_tokens=12, ignore_eos=True).token_ids]
    (sampled,) = llm.generate(["the cat and the dog"], seeded, use_tqdm=False)
    outputs = llm.generate(["the cat and the dog"] * 4, [ruled, plain, seeded, ruled], use_tqdm=False)
    assert [outputs[1].outputs[0].token_ids] == alone
    assert outputs[2].outputs[0].token_ids == sampled.outputs[0].token_ids
    assert outputs[0].outputs[0].token_ids == [50] * 12


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_left_ends_the_request_with_a_reason(llm, n):
    letter = llm.engine.tokenizer.encode("q", add_special_tokens=False)
    stuck = SamplingParams(n=n, max_tokens=12, allowed_token_ids=letter, bad_words=["q"])
    plain = SamplingParams(**GREEDY, ignore_eos=True)
    outputs = llm.generate(["ab", "the cat and the dog"], [stuck, plain], use_tqdm=False)
    for output in outputs[0].outputs:
        assert (output.token_ids, output.finish_reason) == ([], "error")
        assert "no token" in output.stop_reason
    assert outputs[1].outputs[0].token_ids == _one(llm, ignore_eos=True).token_ids
    assert llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {288: 1}}, "logit_bias"),
        ({"logit_bias": {10**30: 1}}, "logit_bias"),
        ({"allowed_token_ids": [5, 288]}, "allowed_token_ids"),
        ({"stop_token_ids": [10**20]}, "stop_token_ids"),
        ({"n": 65}, "n"),
        ({"n": 10**30}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "y" * 1025}, "stop"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs"),
        ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_limits_and_vocabulary(llm, params, field):
    with pytest.raises(InvalidRequestError, match=f"`{field}`") as caught:
        llm.generate("a", SamplingParams(**params), use_tqdm=False)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_limits_are_configurable(text_model):
    arguments = {"max_n": 1, "max_logprobs": 0, "max_stop_strings": 1, "max_stop_length": 2, "max_grammar_length": 3}
    refused = [{"n": 2}, {"logprobs": 1}, {"stop": ["a", "b"]}, {"bad_words": ["abc"]}]
    refused.append({"structured_outputs": {"regex": "abcd"}})
    with LLM(str(text_model), dtype="float32", num_kv_blocks=8, num_threads=1, **arguments) as llm:
        for params in refused:
            with pytest.raises(InvalidRequestError, match=r"\(max_"):
                llm.generate("a", SamplingParams(**params), use_tqdm=False)
        llm.generate("a", SamplingParams(logprobs=0, stop="ab", structured_outputs={"regex": "ab"}), use_tqdm=False)


@pytest.mark.parametrize("params", [{"stop": "x"}, {"bad_words": ["x"]}, {"structured_outputs": {"json_object": True}}])
def test_what_needs_a_tokenizer(tiny_llama, params):
    with (
        LLM(str(tiny_llama), skip_tokenizer_init=True, dtype="float32", num_kv_blocks=8, num_threads=1) as llm,
        pytest.raises(UnsupportedError, match="tokenizer"),
    ):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(**params), use_tqdm=False)


# --- prompts ---


def test_truncation_keeps_the_end_and_the_begin_token(llm):
    def prompt(text, **params):
        (output,) = llm.generate([text], SamplingParams(max_tokens=1, **params), use_tqdm=False)
        return output.prompt_token_ids

    whole = prompt("the cat and the dog")
    assert whole[0] == 1
    assert prompt("the cat and the dog", truncate_prompt_tokens=4) == [1, *whole[-3:]]
    assert prompt({"prompt_token_ids": whole[1:]}, truncate_prompt_tokens=4) == whole[-4:]
    assert prompt("the cat and the dog", truncate_prompt_tokens=200) == whole
    long = "q" * 1000
    assert len(prompt(long, truncate_prompt_tokens=-1)) == 255
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        prompt(long)


def _prompt_logprobs(llm: LLM, prompts, params):
    return [output.prompt_logprobs for output in llm.generate(prompts, params, use_tqdm=False)]


def _assert_same(found, expected):
    for positions, wanted in zip(found, expected, strict=True):
        assert positions[0] is None and wanted[0] is None
        assert len(positions) == len(wanted)
        for position, entry in zip(positions[1:], wanted[1:], strict=True):
            assert position.keys() == entry.keys()
            for token_id, item in position.items():
                assert item.rank == entry[token_id].rank
                assert item.decoded_token == entry[token_id].decoded_token
                assert item.logprob == pytest.approx(entry[token_id].logprob, abs=1e-4)


PROMPTS = [{"prompt_token_ids": [(i * i * 7 + 3 * i + seed) % 280 + 3 for i in range(50)]} for seed in (1, 2)]


@pytest.fixture(scope="module")
def oracle_logprobs(text_model):
    """Of each token of PROMPTS but the first, by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            logprobs = model(ids).logits[0].log_softmax(-1)
        found.append(logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


def test_prompt_logprobs_are_transformers(llm, oracle_logprobs):
    found = _prompt_logprobs(llm, PROMPTS, SamplingParams(max_tokens=2, prompt_logprobs=3))
    for positions, prompt, wanted in zip(found, PROMPTS, oracle_logprobs, strict=True):
        ids = prompt["prompt_token_ids"]
        values = [position[token_id].logprob for position, token_id in zip(positions[1:], ids[1:], strict=True)]
        assert np.allclose(values, wanted, atol=1e-4)
        for position, token_id in zip(positions[1:], ids[1:], strict=True):
            best = sorted(position.values(), key=lambda item: item.rank)
            assert [item.rank for item in best][:3] == [1, 2, 3]
            assert len(position) == 3 + (position[token_id].rank > 3)


@pytest.mark.parametrize("how", ["chunks", "cached", "n", "preempted", "swapped"])
def test_prompt_logprobs_do_not_depend_on_the_schedule(text_model, llm, how):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2, n=3 if how == "n" else 1)
    expected = _prompt_logprobs(llm, PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=2))
    arguments = {"num_kv_blocks": 64, "check_integrity": True}
    if how == "chunks":
        arguments |= {"max_num_batched_tokens": 7, "max_num_seqs": 4}
    if how in ("preempted", "swapped"):
        mode = {"preempted": "recompute", "swapped": "swap"}[how]
        arguments |= {"num_kv_blocks": 9, "swap_space": 0.01, "preemption_mode": mode, "watermark": 0.0}
        arguments |= {"block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    with LLM(str(text_model), dtype="float32", num_threads=1, **arguments) as other:
        if how == "cached":
            other.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        _assert_same(_prompt_logprobs(other, PROMPTS, params), expected)
        if how in ("preempted", "swapped"):
            assert other.stats()["preemptions"] > 0
        if how == "cached":
            # Who does not ask finds the cache as ever.
            (output,) = other.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)
            assert output.num_cached_tokens == 48


def test_a_prompt_of_one_token_has_no_logprobs(llm):
    assert _prompt_logprobs(llm, [{"prompt_token_ids": [5]}], SamplingParams(prompt_logprobs=0)) == [[None]]
    assert _prompt_logprobs(llm, [{"prompt_token_ids": [5]}], SamplingParams()) == [None]


# --- text ---


def test_without_detokenizing_there_are_only_ids(llm):
    output = _one(llm, detokenize=False, logprobs=1)
    assert output.text == ""
    assert output.token_ids == _one(llm).token_ids
    assert all(item.decoded_token is None for position in output.logprobs for item in position.values())


def test_special_tokens_in_the_text(llm):
    params = {"logit_bias": {1: 100}, "max_tokens": 2}
    assert _one(llm, **params).text == ""
    assert _one(llm, **params, skip_special_tokens=False).text == "<s><s>"


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_temperatures_are_greedy(text_model, temperature, dtype):
    with LLM(str(text_model), dtype=dtype, num_kv_blocks=16, num_threads=1) as llm:
        wanted = _one(llm, ignore_eos=True).token_ids
        assert _one(llm, ignore_eos=True, temperature=temperature, top_k=10**9).token_ids == wanted


def test_numbers_in_json_are_finite(llm):
    output = _one(llm, allowed_token_ids=[40], logprobs=20, max_tokens=8)
    entries = [position[i]._asdict() for position in output.logprobs for i in position]
    json.dumps(entries, allow_nan=False)
    assert math.isfinite(output.cumulative_logprob)
    total = sum(position[i].logprob for position, i in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total, rel=1e-6)


def test_a_list_of_token_ids_is_a_prompt(llm):
    params = SamplingParams(**GREEDY)
    (wanted,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    for prompts in ([[5, 6, 7]], [5, 6, 7], [(5, 6, 7)], list(np.array([5, 6, 7]))):
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        assert (output.prompt_token_ids, output.outputs) == ([5, 6, 7], wanted.outputs)
    several = llm.generate([[5, 6, 7], "the cat"], params, use_tqdm=False)
    assert [output.prompt for output in several] == [None, "the cat"]
    for prompts in ([5, "a"], [[5, "a"]], [[5, True]], [[5], 6], [[5.0]], [[-1]], [[]]):
        with pytest.raises(InvalidRequestError, match="`prompt`"):
            llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("written", ["{", json.dumps({"architectures": ["NoSuchModel"]})])
def test_a_model_that_cannot_be_served_is_told_before_its_missing_tokenizer(tmp_path, written):
    (tmp_path / "config.json").write_text(written)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises((ModelLoadError, UnsupportedError), match=r"config\.json|NoSuchModel"):
        LLM(str(tmp_path))
