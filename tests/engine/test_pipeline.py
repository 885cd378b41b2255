"""Planning a step while the one before is computed: the same outputs, and nothing left behind."""

from __future__ import annotations

import threading

import pytest

from paged_backend import SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.pipeline import StepPipeline
from paged_backend.sched.output import SchedulerOutput, WorkerOutput

PROMPTS = [[1, *((7 * i * i + 3 * i + n) % 150 + 5 for i in range(n - 1))] for n in (3, 16, 17, 40, 33, 8)]
CASES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
    "n=3": {"temperature": 1.0, "seed": 4, "n": 3},
    "beams": {"temperature": 0, "use_beam_search": True, "beam_width": 3},
    "rules": {"temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(20, 90))},
    "stop tokens": {"temperature": 1.0, "seed": 6, "stop_token_ids": list(range(40)), "ignore_eos": False},
}


def _engine(path, **changes) -> Engine:
    arguments = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 8, "num_threads": 1, **changes}
    return Engine(EngineConfig(model=str(path), skip_tokenizer_init=True, check_integrity=True, **arguments))


def _run(engine: Engine, kinds: list[str]) -> dict[str, list]:
    """Tokens and reasons per request and output; new requests join while others run."""
    found: dict[str, list] = {}
    waiting = [
        (f"{kind} {number}", prompt, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **CASES[kind]}))
        for kind in kinds
        for number, prompt in enumerate(PROMPTS)
    ]
    while waiting or engine.has_unfinished_requests():
        if waiting:
            request_id, prompt, params = waiting.pop(0)
            engine.add_request(engine.make_request(request_id, prompt, params))
        for delta in engine.step():
            outputs = found.setdefault(delta.request_id, {})
            tokens, reasons = outputs.setdefault(delta.index, ([], []))
            tokens += delta.token_ids
            if delta.finish_reason:
                reasons.append((delta.finish_reason, delta.stop_reason))
    assert all(len(reasons) == 1 for outputs in found.values() for _, reasons in outputs.values())
    return found


@pytest.mark.parametrize("kinds", [[kind] for kind in CASES] + [list(CASES)], ids=[*CASES, "all together"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_blocks": 16, "watermark": 0.0},
        {"num_kv_blocks": 16, "watermark": 0.0, "preemption_mode": "swap", "swap_space": 0.1},
        {"max_num_batched_tokens": 16, "max_num_seqs": 6},
    ],
    ids=["", "recomputed", "swapped", "small steps"],
)
def test_the_same_outputs(tiny_llama, kinds, changes):
    plain, overlapped = _engine(tiny_llama, **changes), _engine(tiny_llama, async_scheduling=True, **changes)
    most = 0
    submit = overlapped._steps.submit

    def counted(plan):
        nonlocal most
        submit(plan)
        most = max(most, len(overlapped._steps))

    overlapped._steps.submit = counted
    assert _run(overlapped, kinds) == _run(plain, kinds)
    assert most == (1 if kinds[0] in ("beams", "rules") else 2)
    stats = overlapped.stats()
    assert stats["blocks_used"] == stats["host_blocks_used"] == 0
    if len(kinds) > 1 and "num_kv_blocks" in changes:
        assert stats["preemptions"] > 0
    plain.close()
    overlapped.close()


def test_aborted_while_a_step_is_under_way(tiny_llama):
    engine = _engine(tiny_llama, async_scheduling=True)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        engine.add_request(engine.make_request(str(number), prompt, params))
    for _ in range(4):
        engine.step()
    assert len(engine._steps) == 1
    assert [delta.finish_reason for delta in engine.abort_request("0")] == ["abort"]
    lengths: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            lengths[delta.request_id] = lengths.get(delta.request_id, 0) + len(delta.token_ids)
    assert "0" not in lengths
    assert engine.stats()["blocks_used"] == 0
    engine.close()


def test_the_next_plan_is_made_while_a_step_computes():
    computing, go_on = threading.Event(), threading.Event()

    def execute(plan: SchedulerOutput) -> WorkerOutput:
        computing.set()
        assert go_on.wait(5)
        return WorkerOutput([plan.num_scheduled_tokens], [0])

    pipeline = StepPipeline(execute, 2)
    pipeline.submit(SchedulerOutput(num_scheduled_tokens=1))
    assert computing.wait(5)
    pipeline.submit(SchedulerOutput(num_scheduled_tokens=2))
    assert len(pipeline) == 2
    go_on.set()
    assert [pipeline.take().seq_ids for _ in range(2)] == [[1], [2]]
    pipeline.close()


def test_an_error_of_the_worker_reaches_the_engine():
    def execute(plan: SchedulerOutput) -> WorkerOutput:
        raise RuntimeError("the device is gone")

    pipeline = StepPipeline(execute, 2)
    pipeline.submit(SchedulerOutput())
    with pytest.raises(RuntimeError, match="gone"):
        pipeline.take()
    pipeline.close()
