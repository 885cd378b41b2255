"""Into how many parts to cut the contexts of a decode batch (split-KV), from what the host knows of it.

A decode step has one program per (sequence, kv head); few long contexts would leave most of the GPU idle, so each
context is cut into `splits` parts that are combined afterwards. Too many parts cost as well: partial results are
written and read again, and programs whose part lies behind a short context start for nothing.

The rule estimates the time of each choice, in tokens read by one of m resident programs, by two bounds on the makespan
of independent jobs, of which the smaller counts. Parts that run last, behind full waves, have fewer neighbours and so
get more of the memory's bandwidth, here up to twice as much:

    waves     whole waves of m programs * longest part + the rest of them, which takes at least half as long
    list      sum of all parts / m + longest part (half of it behind a full wave)
              after Graham, "Bounds on Multiprocessing Timing Anomalies" (1969)

The nearest-to-best choice with the fewest parts wins. Knows numbers only; waits for no device.
"""

from functools import lru_cache

MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 256
RESIDENT_PROGRAMS = 3
"""Programs of the decode kernel that one multiprocessor keeps busy at a time (two to four, by shared memory)."""

# In tokens of context per program: starting one, and, per query row, writing and reading its partial result.
_START = 24
_PARTIAL_PER_ROW = 2
# In tokens: launching the second kernel.
_COMBINE = 80
# How much slower than the best estimate a choice with fewer parts may be.
_SLACK = 1.04


def choose_splits(
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    multiprocessors: int,
    *,
    total_seq_len: int | None = None,
    rows: int = 1,
) -> int:
    """Parts per context, 1 .. MAX_SPLITS; none has fewer than MIN_SPLIT_TOKENS of the longest context.

    Args:
        num_seqs, num_kv_heads: their product is the number of programs without splitting.
        max_seq_len: the longest context (with a window: at most the window).
        multiprocessors: of the GPU.
        total_seq_len: the sum of all contexts; None: all are as long as the longest.
        rows: query rows (tokens * heads of the group) of one program.
    """
    total = num_seqs * max_seq_len if total_seq_len is None else min(total_seq_len, num_seqs * max_seq_len)
    most = min(MAX_SPLITS, max_seq_len // MIN_SPLIT_TOKENS)
    if num_seqs == 0 or most < 2:
        return 1
    # Lengths grow by one per step: rounded, the estimate is made once per 64 steps and not once per layer.
    return _best(
        num_seqs * num_kv_heads, num_kv_heads, -(-max_seq_len // 64), -(-total // 64), most, multiprocessors, rows
    )


@lru_cache(maxsize=4096)
def _best(jobs: int, heads: int, max_tiles: int, total_tiles: int, most: int, multiprocessors: int, rows: int) -> int:
    slots = RESIDENT_PROGRAMS * multiprocessors
    work = total_tiles * 64 * heads

    def cost(splits: int) -> float:
        programs = jobs * splits
        part = -(-max_tiles // splits) * 64
        waves, rest = divmod(programs, slots)
        alone = 0.5 if waves else 1.0
        last = max(rest / slots, alone) if rest else 0.0
        makespan = min((waves + last) * part, work / slots + alone * part)
        overhead = programs * _START / slots
        if splits > 1:
            # Parts behind the end of a short context start, and leave nothing to combine.
            used = min(programs, work // part + jobs)
            overhead += used * _PARTIAL_PER_ROW * rows / slots + _COMBINE
        return makespan + overhead

    costs = [cost(splits) for splits in range(1, most + 1)]
    allowed = min(costs) * _SLACK
    return next(i for i, c in enumerate(costs, 1) if c <= allowed)
