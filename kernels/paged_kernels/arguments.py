"""What `ops.paged_attention` hands to a backend beside tensors: bounds that the host knows, and options."""

from dataclasses import dataclass

import torch

QUANTISED_DTYPES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Types a cache may have that differ from the query's, and the largest value of each; read with scales."""

MAX_SHORT_QUERY = 8
"""Longest query, in tokens, that is computed like a decode (split over its context): see `Bounds.num_short`."""


# Neither is frozen: both are made at every layer of every step, and a frozen one costs several times as much.


@dataclass(slots=True)
class Bounds:
    """Host-side numbers of a batch; nothing waits for the device.

    Attributes:
        num_decodes: leading sequences of exactly one query token.
        num_short: leading sequences of at most MAX_SHORT_QUERY query tokens, the decodes among them.
        max_query_len, max_seq_len: at least the batch's longest.
        total_seq_len: sum of the contexts, or None where it is not known.
    """

    num_decodes: int
    num_short: int
    max_query_len: int
    max_seq_len: int
    total_seq_len: int | None = None


@dataclass(slots=True)
class Options:
    """How scores become weights; the defaults leave out each option. See `ops.paged_attention`."""

    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def window_only(self) -> bool:
        """Nothing but (perhaps) a window is asked for."""
        no_scores = self.soft_cap is None and self.alibi_slopes is None and self.sinks is None
        return no_scores and self.k_scale is None and self.v_scale is None

    @property
    def scales(self) -> str:
        """How a quantised cache is scaled: `none`, `tensor`, or `token` (one scale per token and head)."""
        if self.k_scale is None:
            return "none"
        return "tensor" if self.k_scale.dim() == 0 else "token"
