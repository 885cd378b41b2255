"""The worker's side of a plan, difference by difference: copies, swaps, siblings, beams, told tokens, null blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from helpers import GREEDY, drive
from transformers import RepetitionPenaltyLogitsProcessor

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, PagedBackendError
from paged_backend.sampling_params import SamplingParams
from paged_backend.sched.output import NewSequence, ScheduledSequence, SchedulerOutput, WorkerOutput
from paged_backend.worker.model_runner import ModelRunner
from paged_backend.worker.worker import Worker

BLOCK = 8
PROMPT = [5 + (j * j * 17 + j) % 150 for j in range(19)]
OTHER = [7 + (j * 29) % 140 for j in range(24)]
SAMPLED = SamplingParams(temperature=1.2)
BEAM = SamplingParams(temperature=0.0, use_beam_search=True, beam_width=4)


def _worker(path, **options) -> Worker:
    options = {"num_kv_blocks": 40, "swap_space": 0.01, "preemption_mode": "swap", **options}
    return Worker(
        EngineConfig(
            model=str(path),
            device="cpu",
            attention_backend="cpu",
            block_size=BLOCK,
            num_threads=1,
            dtype="float32",
            **options,
        )
    )


@pytest.fixture(scope="module")
def worker(tiny_llama) -> Worker:
    """Shared; each test removes its rows."""
    return _worker(tiny_llama)


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def _log_softmax(oracle, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probabilities of each next token: [len(tokens), vocabulary]."""
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def _new(seq_id, tokens, blocks, params=GREEDY, *, seed=0, num_prompt=None, **options) -> NewSequence:
    return NewSequence(seq_id, list(tokens), num_prompt or len(tokens), list(blocks), params, seed, **options)


def _plan(*scheduled: tuple, **fields) -> SchedulerOutput:
    """A plan of (sequence, computed, new, samples) tuples."""
    items = [ScheduledSequence(*item) for item in scheduled]
    return SchedulerOutput(scheduled=items, num_scheduled_tokens=sum(s.num_new_tokens for s in items), **fields)


def _tokens(output: WorkerOutput) -> dict[int, int]:
    return dict(zip(output.seq_ids, output.token_ids, strict=True))


# ---- siblings and copy-on-write ------------------------------------------------------------------------------------


def test_siblings_share_the_prompt_and_go_their_own_ways(worker):
    """As each alone: own parameters, own seeds; in the second step two of the three copy the shared last block."""
    params = [SAMPLED, GREEDY, SamplingParams(temperature=0.7, top_k=20, frequency_penalty=1.0)]
    alone = [drive(worker, [PROMPT], 12, params=[params[i]], seeds=[i + 40], first_seq_id=900 + i)[0] for i in range(3)]
    rows = [_new(i, PROMPT, [4, 2, 9], params[i], seed=i + 40) for i in range(3)]
    joint: list[list[int]] = [[], [], []]
    output = worker.execute(_plan((2, 0, 10, ()), new=[rows[2]]))
    assert output == WorkerOutput([], [])
    steps = [_plan((2, 10, 9, (2, 0, 1)), new=rows[:2])]
    steps.append(
        _plan(
            *[(i, 19, 1, (i,)) for i in range(3)],
            copies=[(9, 7), (9, 3)],
            replaced_block_ids={0: [(2, 7)], 2: [(2, 3)]},
        )
    )
    for position in range(20, 30):
        added = {i: [20 + i] for i in range(3)} if position == 24 else {}
        steps.append(_plan(*[(i, position, 1, (i,)) for i in range(3)], new_block_ids=added))
    for step in steps:
        for seq_id, token in _tokens(worker.execute(step)).items():
            joint[seq_id].append(token)
    worker.execute(SchedulerOutput(removed=[0, 1, 2]))
    assert joint == alone
    assert len({tuple(tokens) for tokens in joint}) == 3


def test_siblings_beside_other_rows(worker):
    """The logits' rows are told apart when some are shared and some are not."""
    alone = {
        i: drive(worker, [tokens], 1, params=[SAMPLED], seeds=[i], first_seq_id=900 + i)[0][0]
        for i, tokens in {1: OTHER, 2: PROMPT, 3: PROMPT, 4: PROMPT, 5: OTHER[:5], 6: OTHER[:5]}.items()
    }
    rows = [_new(1, OTHER, [1, 2, 3], SAMPLED, seed=1)]
    rows += [_new(i, PROMPT, [4, 5, 6], SAMPLED, seed=i) for i in (2, 3, 4)]
    rows += [_new(i, OTHER[:5], [7], SAMPLED, seed=i) for i in (5, 6)]
    output = worker.execute(_plan((1, 0, 24, (1,)), (2, 0, 19, (2, 4, 3)), (5, 0, 5, (5, 6)), new=rows))
    worker.execute(SchedulerOutput(removed=[1, 2, 3, 4, 5, 6]))
    assert _tokens(output) == alone


def test_copies_of_a_step_read_the_blocks_as_they_were(worker):
    """A chain: one sequence's block moves on to another block while a second one's moves in where it was."""
    expected = [drive(worker, [tokens], 2, first_seq_id=900)[0] for tokens in (PROMPT, OTHER[:19])]
    rows = [_new(1, PROMPT, [1, 2, 3]), _new(2, OTHER[:19], [4, 5, 6])]
    first = _tokens(worker.execute(_plan((1, 0, 19, (1,)), (2, 0, 19, (2,)), new=rows)))
    second = _tokens(
        worker.execute(
            _plan(
                (1, 19, 1, (1,)),
                (2, 19, 1, (2,)),
                copies=[(4, 1), (1, 8), (6, 3), (3, 9)],
                replaced_block_ids={1: [(0, 8), (2, 9)], 2: [(0, 1), (2, 3)]},
            )
        )
    )
    worker.execute(SchedulerOutput(removed=[1, 2]))
    assert [[first[i], second[i]] for i in (1, 2)] == expected


# ---- swaps ---------------------------------------------------------------------------------------------------------


def test_swapped_sequence_continues_as_if_never_preempted(worker):
    params = SamplingParams(temperature=1.1, presence_penalty=0.3, repetition_penalty=1.3)
    whole = drive(worker, [PROMPT], 6, params=[params], seeds=[8], first_seq_id=900)[0]
    got = [_tokens(worker.execute(_plan((1, 0, 19, (1,)), new=[_new(1, PROMPT, [3, 1, 2], params, seed=8)])))[1]]
    got.append(_tokens(worker.execute(_plan((1, 19, 1, (1,)))))[1])
    # Out, and in the same step another sequence writes over its blocks.
    worker.execute(
        _plan((2, 0, 24, (2,)), removed=[1], swap_out=[(3, 5), (1, 6), (2, 2)], new=[_new(2, OTHER, [1, 2, 3])])
    )
    back = _new(3, PROMPT + got, [10, 3, 1], params, seed=8, num_prompt=len(PROMPT))
    plan = _plan((3, 20, 1, (3,)), removed=[2], swap_in=[(5, 10), (6, 3), (2, 1)], new=[back])
    got.append(_tokens(worker.execute(plan))[3])
    for position in range(21, 24):
        got.append(_tokens(worker.execute(_plan((3, position, 1, (3,)))))[3])
    worker.execute(SchedulerOutput(removed=[3]))
    assert got == whole


def test_swap_and_copy_in_one_step(worker):
    """A block that comes in is copied on write at once."""
    expected = drive(worker, [PROMPT], 2, first_seq_id=900)[0]
    first = _tokens(worker.execute(_plan((1, 0, 19, (1,)), new=[_new(1, PROMPT, [1, 2, 3])])))[1]
    worker.execute(_plan(removed=[1], swap_out=[(1, 1), (2, 2), (3, 3)]))
    back = _new(2, [*PROMPT, first], [4, 5, 7])
    plan = _plan((2, 19, 1, (2,)), swap_in=[(1, 4), (2, 5), (3, 6)], copies=[(6, 7)], new=[back])
    assert [first, _tokens(worker.execute(plan))[2]] == expected
    worker.execute(SchedulerOutput(removed=[2]))


def test_swap_space_is_counted_in_blocks(tiny_llama):
    """2 layers x 2 x 2 heads x 8 tokens x 16 elements x 4 bytes are 4 KiB a block."""
    worker = _worker(tiny_llama, swap_space=1.0, preemption_mode="auto")
    assert worker.num_host_blocks == 2**30 // 4096
    assert all(0.0 < seconds < 1.0 for seconds in worker.preemption_costs)
    for options in ({"swap_space": 0.0}, {"preemption_mode": "recompute"}):
        assert _worker(tiny_llama, **options).preemption_costs == (0.0, 0.0)
    assert _worker(tiny_llama, swap_space=0.0).num_host_blocks == 0
    with pytest.raises(ConfigError, match=r"`swap_space` = 1e\+06 GiB is .* MiB more than the available") as caught:
        _worker(tiny_llama, swap_space=1e6)
    assert caught.value.field == "swap_space"


# ---- sliding windows -----------------------------------------------------------------------------------------------


def test_null_blocks_are_read_in_place_of_released_ones(worker):
    """With the released blocks' contents in the null block nothing changes; with others the logits do."""
    expected = drive(worker, [OTHER[:9]], 3, first_seq_id=900)[0]
    found = []
    for source in (1, 30):
        plan = _plan((1, 0, 9, (1,)), new=[_new(1, OTHER[:9], [1, 2], num_logprobs=0)])
        outputs = [worker.execute(plan)]
        cache = worker._runner._kv_cache
        cache[:, :, 30] = 0.5
        cache[:, :, 0] = cache[:, :, source]
        cache[:, :, 1] = float("nan")
        outputs.append(worker.execute(_plan((1, 9, 1, (1,)), null_blocks={1: 1})))
        # The table stays as it is now.
        outputs.append(worker.execute(_plan((1, 10, 1, (1,)))))
        worker.execute(SchedulerOutput(removed=[1]))
        cache.zero_()
        found.append(outputs)
    assert [_tokens(output)[1] for output in found[0]] == expected
    assert found[0][0] == found[1][0]
    assert abs(found[0][1].logprobs[1].logprob - found[1][1].logprobs[1].logprob) > 1e-4


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits(worker, oracle):
    """Whatever the temperature and the penalties; rows that ask for none get none, others as many as they ask for."""
    params = SamplingParams(temperature=1.5, repetition_penalty=2.0, frequency_penalty=1.5)
    wants = {1: 5, 2: None, 3: 0, 4: 2}
    rows = [_new(i, PROMPT, [4 * i, 4 * i + 1, 4 * i + 2], params, seed=i, num_logprobs=k) for i, k in wants.items()]
    outputs = [worker.execute(_plan(*[(i, 0, 19, (i,)) for i in wants], new=rows))]
    outputs += [worker.execute(_plan(*[(i, position, 1, (i,)) for i in wants])) for position in range(19, 24)]
    worker.execute(SchedulerOutput(removed=list(wants)))
    for seq_id, count in wants.items():
        tokens = PROMPT + [_tokens(output)[seq_id] for output in outputs]
        expected = _log_softmax(oracle, tokens)[len(PROMPT) - 1 :]
        for output, token, values in zip(outputs, tokens[len(PROMPT) :], expected, strict=False):
            if count is None:
                assert seq_id not in output.logprobs
                continue
            found = output.logprobs[seq_id]
            assert found.rank == (values > values[token]).sum() + 1
            assert found.top_ids == values.topk(count).indices.tolist()
            np.testing.assert_allclose(
                [found.logprob, *found.top_logprobs], [values[token], *values.topk(count).values], atol=1e-5
            )


# ---- beams ---------------------------------------------------------------------------------------------------------


def test_beams_report_continuations_and_are_told_the_choice(worker, oracle):
    """Two beams from one prompt, beside a sampled row: candidates as transformers', then with the told tokens."""
    params = SamplingParams(temperature=0.0, use_beam_search=True, beam_width=4, repetition_penalty=1.4)
    alone = drive(worker, [OTHER], 3, first_seq_id=900)[0]
    output = worker.execute(
        _plan(
            (1, 0, 19, (1,)),
            (2, 0, 24, (2,)),
            new=[_new(1, PROMPT, [1, 2, 3], params, num_logprobs=8, is_beam=True), _new(2, OTHER, [4, 5, 6])],
        )
    )
    assert output.seq_ids == [2]
    assert output.logprobs.keys() == {1}
    _expect_candidates(output, 1, oracle, PROMPT, 1.4)
    first, second = output.logprobs[1].top_ids[:2]
    # The beam goes on with the second best, a fork of it with the best.
    fork = _new(3, [*PROMPT, first], [1, 2, 7], params, num_prompt=19, num_logprobs=6, is_beam=True)
    output = worker.execute(
        _plan(
            (1, 19, 1, (1,)),
            (2, 24, 1, (2,)),
            (3, 19, 1, (3,)),
            copies=[(3, 7)],
            new=[fork],
            new_token_ids={1: [second]},
            new_block_ids={2: [8]},
        )
    )
    assert output.seq_ids == [2]
    assert [len(output.logprobs[i].top_ids) for i in (1, 3)] == [8, 6]
    _expect_candidates(output, 1, oracle, [*PROMPT, second], 1.4)
    _expect_candidates(output, 3, oracle, [*PROMPT, first], 1.4)
    assert (output.logprobs[1].logprob, output.logprobs[1].rank) == (0.0, 0)
    output = worker.execute(_plan((2, 25, 1, (2,)), removed=[1, 3]))
    assert output.token_ids == alone[2:]
    assert not output.logprobs
    worker.execute(SchedulerOutput(removed=[2]))


def test_a_beam_that_is_told_nothing_reports_again(worker):
    """As after a recomputation: the same candidates."""
    fields = {"num_logprobs": 4, "is_beam": True}
    first = worker.execute(_plan((1, 0, 19, (1,)), new=[_new(1, PROMPT, [1, 2, 3], BEAM, **fields)]))
    again = worker.execute(_plan((2, 0, 19, (2,)), removed=[1], new=[_new(2, PROMPT, [3, 4, 5], BEAM, **fields)]))
    worker.execute(SchedulerOutput(removed=[2]))
    assert first.logprobs[1] == again.logprobs[2]


def _expect_candidates(output: WorkerOutput, seq_id: int, oracle, tokens: list[int], penalty: float) -> None:
    found = output.logprobs[seq_id]
    scores = _log_softmax(oracle, tokens)[-1:]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), scores).topk(len(found.top_ids))
    assert found.top_ids == expected.indices[0].tolist()
    np.testing.assert_allclose(found.top_logprobs, expected.values[0], atol=1e-5)


# ---- plans that break the contract ---------------------------------------------------------------------------------

TEN = list(range(5, 15))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_plan((1, 0, 1, ())), "no row"),
        (SchedulerOutput(removed=[1]), "no row"),
        (SchedulerOutput(new_token_ids={1: [3]}), "no row"),
        (SchedulerOutput(new_block_ids={1: [3]}), "no row"),
        (SchedulerOutput(replaced_block_ids={1: [(0, 3)]}), "no row"),
        (SchedulerOutput(null_blocks={1: 1}), "no row"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2])] * 2), "already"),
        (SchedulerOutput(new=[_new(i, TEN, [1, 2]) for i in range(5)]), "its maximum"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2])], new_token_ids={1: [3]}), "rows that it creates"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2])], new_block_ids={1: [3]}), "rows that it creates"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2])], replaced_block_ids={1: [(0, 3)]}), "rows that it creates"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2])], null_blocks={1: 1}), "rows that it creates"),
        (SchedulerOutput(new=[_new(1, TEN, [1, 2], BEAM, is_beam=True)]), "asks for no continuations"),
        (SchedulerOutput(swap_in=[(1, 1)], swap_out=[(2, 2)]), "in and out at once"),
        (SchedulerOutput(swap_in=[(3, 1)]), "do not exist"),
        (SchedulerOutput(swap_out=[(1, 3)]), "do not exist"),
        (SchedulerOutput(copies=[(1, 9)]), "do not exist"),
        (SchedulerOutput(copies=[(1, 2), (3, 2)]), "twice"),
        (_plan((1, 0, 11, (1,)), new=[_new(1, TEN, [1, 2])]), "does not fit"),
        (_plan((1, 0, 10, (1,)), new=[_new(1, TEN, [1])]), "does not fit"),
        (_plan((1, 0, 9, (1,)), new=[_new(1, TEN, [1, 2])]), "does not fit"),
        (_plan((1, 0, 10, ()), new=[_new(1, TEN, [1, 2])]), "does not fit"),
        (_plan((1, 3, 0, ()), new=[_new(1, TEN, [1, 2])]), "does not fit"),
        (_plan((1, 0, 10, (2,)), new=[_new(1, TEN, [1, 2]), _new(2, TEN, [1, 2])]), "does not fit"),
        (_plan((1, 0, 9, (2,)), new=[_new(1, TEN, [1, 2]), _new(2, TEN[:9], [1, 2])]), "does not fit"),
        (_plan((1, 0, 10, (1, 2)), new=[_new(1, TEN, [1, 2])]), "no row"),
        (_plan((1, 0, 10, (1, 2)), new=[_new(1, TEN, [1, 2]), _new(2, TEN[:9], [1, 2])]), "has other tokens"),
        (_plan((1, 0, 10, (1, 2)), new=[_new(1, TEN, [1, 2]), _new(2, TEN[::-1], [1, 2])]), "has other tokens"),
        (_plan((1, 0, 10, (1, 1)), new=[_new(1, TEN, [1, 2])]), "samples a sequence twice"),
        (_plan((1, 0, 4, ()), (1, 4, 6, (1,)), new=[_new(1, TEN, [1, 2])]), "computes a sequence twice"),
        (_plan((1, 0, 10, (1,)), new=[_new(1, TEN, [1, 0])]), "null block"),
        (SchedulerOutput(scheduled=[ScheduledSequence(1, 0, 10, (1,))], new=[_new(1, TEN, [1, 2])]), "counts 0 tokens"),
    ],
)
def test_contradictory_plans_are_errors(plan, message):
    """Before any model runs: there is none."""
    runner = ModelRunner(None, torch.zeros(2, 2, 9, 2, BLOCK, 4), 4, "reference", num_host_blocks=2)
    with pytest.raises(PagedBackendError, match=message):
        runner.execute(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replaced_block_ids": {1: [(2, 3)]}}, "no block 2 to replace"),
        ({"replaced_block_ids": {1: [(-1, 3)]}}, "no block -1 to replace"),
        ({"null_blocks": {1: 3}}, "cannot release 3"),
        ({"null_blocks": {1: -1}}, "cannot release -1"),
        ({"removed": [1], "new_block_ids": {1: [3]}}, "no row"),
    ],
)
def test_changes_beyond_a_row_are_errors(changes, message):
    runner = ModelRunner(None, torch.zeros(2, 2, 9, 2, BLOCK, 4), 4, "reference")
    runner.execute(SchedulerOutput(new=[_new(1, TEN, [1, 2])]))
    with pytest.raises(PagedBackendError, match=message):
        runner.execute(SchedulerOutput(**changes))
