"""`CpuDecoder`: the same decoder for CPUs, as one program of native kernels that all threads run through together.

    embed | norm  qkv  split+KV write  decode  prefill  o+residual  norm  gate-up  down+residual | ... | norm  head

The kernels, their argument records and the buffers between them are fixed when the model is loaded; a step sets the
counts and the addresses of its own arrays and runs everything in one call. So at one token a step, where reading the
weights is nearly all there is to do, no time goes to launching two hundred operations from Python. Steps of single
tokens run the head in the same call; others have few rows that need it, which the caller picks.

Activations between products are float32, the residual stream too; rows enter products in the weights' own type.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from paged_backend.model.attention import AttentionMetadata
from paged_backend.model.config import ModelConfig
from paged_backend.model.decoder import Decoder, DecoderLayer
from paged_kernels.cpu.decode import (
    DECODE_ARGUMENTS,
    SPLIT_TOKENS,
    attention_fields,
    build_decode,
    plan_decode,
    softmax_scale,
)
from paged_kernels.cpu.linear import LINEAR_ARGUMENTS, PackedLinear, build_linear, readable_rows
from paged_kernels.cpu.memory import Arena
from paged_kernels.cpu.prefill import PREFILL_ARGUMENTS, build_prefill, plan_prefill
from paged_kernels.cpu.rows import (
    EMBED_ARGUMENTS,
    NORM_ARGUMENTS,
    QKV_ARGUMENTS,
    build_embed,
    build_norm,
    build_qkv,
)
from paged_kernels.cpu.runtime import UNBOUNDED, Arguments, Program, element_type, thread_count

# Multiply-adds of a step below which waking other threads costs more than the work.
_PARALLEL_PRODUCTS = 1 << 18


class Model(Protocol):
    """What the worker needs of a decoder: `Decoder` and `CpuDecoder`."""

    config: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the KV cache."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See `Decoder.forward`; the result is valid until the next call."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.compute_logits`; the result is valid until the next call of either."""


class _Call:
    """One kernel of a program, called once or once per layer: its argument records and places in the program."""

    def __init__(self, kernel: Any, arguments: Arguments, count: int, **fields: Any) -> None:
        self.kernel = kernel
        self.places = np.empty(count, dtype=np.int64)
        self._arguments = arguments
        self._records = arguments.records(count, **fields)
        # What is behind addresses in the records lives as long as they are there.
        self._kept: list[Any] = [fields]
        self._held: dict[str, Any] = {}
        self._items = -1

    def address(self, index: int) -> int:
        """Of one record."""
        return self._records.ctypes.data + index * self._records.itemsize

    def set(self, **fields: Any) -> None:
        """Set fields in all records; those that are as they were cost next to nothing."""
        for name, value in fields.items():
            held = self._held.get(name)
            if value is not held and (type(value) is not int or value != held):
                self._arguments.fill(self._records, **{name: value})
                self._held[name] = value

    def set_items(self, program: Program, items: int) -> None:
        """Set the work items of all calls."""
        if items != self._items:
            self._items = program.items[self.places] = items

    def set_one(self, index: int, **fields: Any) -> None:
        """Set fields in one record, for good."""
        self._arguments.fill(self._records[index : index + 1], **fields)
        self._kept.append(fields)


class CpuDecoder:
    """A decoder on the CPU. Built from a loaded `Decoder`, whose weights it takes over in its own layout.

    Args:
        decoder: float32 or bfloat16, on the CPU; not usable afterwards.
        max_tokens: tokens in one step at most.
    """

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        self.config = decoder.config
        self._dtype = decoder.dtype
        self._element = element_type(decoder.dtype)
        self._frequencies = decoder.frequencies.numpy()
        self._buffers = _Buffers(self.config, decoder.dtype, max_tokens)
        self._embedding = decoder.embedding.data
        self._arena = Arena()
        self._head = PackedLinear(decoder.head.data, arena=self._arena)
        self._final_norm = decoder.final_norm.data.float()
        self._weights = 0
        # Each kind of product, with the weights of one layer.
        self._linears: dict[str, tuple[_Call, PackedLinear]] = {}
        self._cache: torch.Tensor | None = None
        # What the last step returned, and what `compute_logits` did; both are used again by steps of that size.
        self._hidden, self._num_tokens = self._buffers.residual[:0], 0
        self._logits, self._num_logits = torch.empty(0, self.config.vocab_size), 0
        # The hidden states whose logits have been computed already.
        self._logits_of: torch.Tensor | None = None
        # Of the last step: what it was given, the block tables, and between which chunks the decoding sequences lay.
        self._inputs: tuple = ()
        self._tables: torch.Tensor | None = None
        self._cuts: list[tuple[int, int]] = []
        self._done = np.zeros(max_tokens * self.config.num_kv_heads, dtype=np.int64)
        self._make_calls(list(decoder.layers))
        self._program = Program(self._ordered_calls())
        head = (self._last_norm, self._last_linear)
        self._head_program = Program([(call.kernel, call.address(0)) for call in head])

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Whether the kernels take these dimensions: bfloat16 products go along pairs."""
        return config.hidden_size % 2 == 0 and config.intermediate_size % 2 == 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the KV cache."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; embeddings and head count twice, since lookups need rows and products panels."""
        table = self._embedding.numel() * self._embedding.element_size()
        return self._weights + table + self._head.num_bytes

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See `Decoder.forward`; the result is float32 and valid until the next call."""
        if kv_cache is not self._cache:
            self._use_cache(kv_cache)
        angles = positions.numpy().astype(np.float32)[:, None] * self._frequencies
        tokens = len(angles)
        np.cos(angles, out=self._buffers.cos[:tokens])
        np.sin(angles, out=self._buffers.sin[:tokens])
        threads = self._threads(tokens)
        per_item = -(-tokens // (8 * threads))
        rows = -(-tokens // per_item)
        self._embed.set(ids=input_ids, rows=tokens, rows_per_item=per_item)
        self._norm.set(rows=tokens, rows_per_item=per_item)
        self._split.set(slots=metadata.slot_mapping, tokens=tokens, tokens_per_item=per_item)
        for call in (self._embed, self._norm, self._split):
            call.set_items(self._program, rows)
        if tokens != self._num_tokens:
            self._hidden, self._num_tokens = self._buffers.residual[:tokens], tokens
            for call, packed in self._linears.values():
                rows_per_item, items = packed.plan(tokens)
                call.set(rows=tokens, rows_per_item=rows_per_item)
                call.set_items(self._program, items)
        are_single = metadata.num_decodes == tokens
        self._plan_decode(metadata)
        self._prefill.set_items(self._program, 0 if are_single else self._plan_prefill(metadata, threads))
        if are_single:
            self._set_head(self._hidden, tokens)
        self._last_norm.set_items(self._program, tokens if are_single else 0)
        self._last_linear.set_items(self._program, self._head.plan(tokens)[1] if are_single else 0)
        self._logits_of = self._hidden if are_single else None
        # Let go of at the next step: right after this one the code that frees tensors is not in the caches.
        self._inputs = positions, metadata
        self._program.run(threads)
        return self._hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.compute_logits`; the result is valid until the next call of this or of the decoder."""
        if hidden is self._logits_of:
            return self._logits
        count = len(hidden)
        self._set_head(hidden.contiguous(), count)
        self._head_program.items[:] = count, self._head.plan(count)[1]
        self._logits_of = None
        self._head_program.run(self._threads(count))
        return self._logits

    # --- making the program ---

    def _make_calls(self, layers: list[DecoderLayer]) -> None:
        """All calls but the head's, with the fields that never change."""
        config, buffers, element, count = self.config, self._buffers, self._element, len(layers)
        hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self._embed = _Call(
            build_embed(element), EMBED_ARGUMENTS, 1, table=self._embedding, out=buffers.residual, size=hidden
        )
        self._norm = _Call(
            build_norm(element), NORM_ARGUMENTS, 2 * count,
            x=buffers.residual, out=buffers.normed, size=hidden, eps=config.rms_norm_eps,
        )  # fmt: skip
        qkv_size = (heads + 2 * kv_heads) * dim
        self._qkv = self._linear("store", count, a=buffers.normed, a_row=hidden, out=buffers.qkv, out_row=qkv_size)
        self._split = _Call(
            build_qkv(dim, element), QKV_ARGUMENTS, count,
            qkv=buffers.qkv, query=buffers.query, q_heads=heads, kv_heads=kv_heads, has_norm=config.qk_norm,
            q_norm=self._final_norm, k_norm=self._final_norm, eps=config.rms_norm_eps, cos=buffers.cos, sin=buffers.sin,
        )  # fmt: skip
        window = UNBOUNDED if config.sliding_window is None else config.sliding_window
        fixed = {"window": window, "scale": softmax_scale(dim**-0.5)}
        self._decode = _Call(
            build_decode(dim, heads // kv_heads, element), DECODE_ARGUMENTS, count, done=self._done, **fixed
        )
        self._prefill = _Call(build_prefill(dim, element), PREFILL_ARGUMENTS, count, **fixed)
        size, inner = heads * dim, config.intermediate_size
        residual = {"out": buffers.residual, "out_row": hidden}
        self._output = self._linear("add", count, a=buffers.attended, a_row=size, **residual)
        self._gate_up = self._linear("gated", count, a=buffers.normed, a_row=hidden, out=buffers.inner, out_row=inner)
        self._down = self._linear("add", count, a=buffers.inner, a_row=inner, **residual)
        self._last_norm = _Call(
            build_norm(element), NORM_ARGUMENTS, 1,
            weight=self._final_norm, size=hidden, rows_per_item=1, eps=config.rms_norm_eps,
        )  # fmt: skip
        self._last_linear = self._linear("store", 1, **self._head.fields(), a_row=hidden, out_row=config.vocab_size)
        for index, layer in enumerate(layers):
            self._take_weights(index, layer)

    def _linear(self, epilogue: str, count: int, **fields: Any) -> _Call:
        return _Call(build_linear(self._element, epilogue), LINEAR_ARGUMENTS, count, **fields)

    def _take_weights(self, index: int, layer: DecoderLayer) -> None:
        """Pack a layer's weights and let go of the originals, so that no two models are in memory."""
        attention, mlp = layer.attention, layer.mlp
        for call, owner, name, gated in (
            (self._qkv, attention, "qkv", False),
            (self._output, attention, "o", False),
            (self._gate_up, mlp, "gate_up", True),
            (self._down, mlp, "down", False),
        ):
            weight, bias = getattr(owner, f"{name}_weight").data, getattr(owner, f"{name}_bias")
            packed = PackedLinear(weight, bias, gated=gated, arena=self._arena)
            setattr(owner, f"{name}_weight", None)
            call.set_one(index, **packed.fields())
            self._linears[name] = call, packed
            self._weights += packed.num_bytes
        self._norm.set_one(2 * index, weight=layer.input_norm.data.float())
        self._norm.set_one(2 * index + 1, weight=layer.post_norm.data.float())
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = {"q_norm": attention.q_norm.data.float(), "k_norm": attention.k_norm.data.float()}
            self._split.set_one(index, **norms)

    def _ordered_calls(self) -> list[tuple[Any, int]]:
        """The program; notes at which place each call's records stand."""
        order = [(self._embed, 0)]
        for layer in range(self.config.num_layers):
            order += [
                (self._norm, 2 * layer), (self._qkv, layer), (self._split, layer), (self._decode, layer),
                (self._prefill, layer), (self._output, layer), (self._norm, 2 * layer + 1), (self._gate_up, layer),
                (self._down, layer),
            ]  # fmt: skip
        order += [(self._last_norm, 0), (self._last_linear, 0)]
        for place, (call, index) in enumerate(order):
            call.places[index] = place
        return [(call.kernel, call.address(index)) for call, index in order]

    # --- parts of a step ---

    def _set_head(self, hidden: torch.Tensor, count: int) -> None:
        """Point the head at hidden states, and at new logits if there are not as many as the last time."""
        if count != self._num_logits:
            self._logits, self._num_logits = torch.empty(count, self.config.vocab_size), count
            normed = torch.empty(readable_rows(count), self.config.hidden_size, dtype=self._dtype)
            self._last_norm.set(out=normed, rows=count)
            rows_per_item, _ = self._head.plan(count)
            self._last_linear.set(a=normed, out=self._logits, rows=count, rows_per_item=rows_per_item)
        self._last_norm.set(x=hidden)

    def _threads(self, tokens: int) -> int:
        products = tokens * self.config.hidden_size * self.config.intermediate_size
        return thread_count() if products >= _PARALLEL_PRODUCTS else 1

    def _use_cache(self, kv_cache: torch.Tensor) -> None:
        """Point the layers at their caches."""
        self._cache = kv_cache
        for layer in range(self.config.num_layers):
            keys, values = kv_cache[layer, 0], kv_cache[layer, 1]
            k_block, k_head, k_token, _ = keys.stride()
            v_block, v_head, v_token, _ = values.stride()
            strides = {
                "k_block": k_block, "k_head": k_head, "k_token": k_token,
                "v_block": v_block, "v_head": v_head, "v_token": v_token,
            }  # fmt: skip
            where = {"k_cache": keys, "v_cache": values, "block_size": keys.shape[2], **strides}
            for call in (self._split, self._decode, self._prefill):
                call.set_one(layer, **where)

    def _plan_decode(self, metadata: AttentionMetadata) -> None:
        """Set the fields and work items of attention for the sequences with one token."""
        config, count = self.config, metadata.num_decodes
        window = config.sliding_window or UNBOUNDED
        lens = metadata.seq_lens.numpy()[:count].tolist()
        if lens:
            self._decode.set(lens=metadata.seq_lens)
            if metadata.block_tables is not self._tables:
                self._tables = metadata.block_tables
                self._decode.set(**self._attention_fields(self._tables, metadata.seq_lens))
        # A plan holds until a sequence's context begins or ends in another chunk.
        cuts = [(max(0, length - window) // SPLIT_TOKENS, -(-length // SPLIT_TOKENS)) for length in lens]
        if cuts != self._cuts:
            self._cuts, items = cuts, 0
            if lens:
                fields, items = plan_decode(lens, config.num_heads, config.num_kv_heads, config.head_dim, window)
                self._decode.set(**fields)
            self._decode.set_items(self._program, items)

    def _plan_prefill(self, metadata: AttentionMetadata, threads: int) -> int:
        """Set the fields of attention for the sequences with several tokens; returns the number of work items."""
        config, first = self.config, metadata.num_decodes
        starts = metadata.query_start_loc[first:]
        group = config.num_heads // config.num_kv_heads
        fields, items = plan_prefill(np.diff(starts.numpy()), config.num_kv_heads, group, threads)
        fields |= self._attention_fields(metadata.block_tables[first:], metadata.seq_lens[first:])
        self._prefill.set(**fields, starts=starts)
        return items

    def _attention_fields(self, block_tables: torch.Tensor, seq_lens: torch.Tensor) -> dict:
        """The fields of attention that do not differ between layers."""
        assert self._cache is not None
        keys, values = self._cache[0]
        fields = attention_fields(self._buffers.query, keys, values, block_tables, seq_lens, self._buffers.attended)
        return {name: value for name, value in fields.items() if name not in ("k_cache", "v_cache")}


class _Buffers:
    """What the kernels of a step hand to each other."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tokens: int) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        tokens = readable_rows(tokens)
        self.residual = torch.empty(tokens, config.hidden_size)
        self.normed = torch.empty(tokens, config.hidden_size, dtype=dtype)
        self.qkv = torch.empty(tokens, (heads + 2 * kv_heads) * dim)
        self.query = torch.empty(tokens, heads, dim, dtype=dtype)
        self.attended = torch.empty(tokens, heads, dim, dtype=dtype)
        self.inner = torch.empty(tokens, config.intermediate_size, dtype=dtype)
        self.cos, self.sin = np.empty((2, tokens, dim // 2), dtype=np.float32)
