"""`EngineConfig`: the engine arguments, validated. Key names follow vLLM's, so an existing `model.json` works.

The configuration a user writes may leave things open (`auto`, None); `resolve()` closes them against a model and a
device and returns a new object. This module knows no torch and reads no files.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.errors import ConfigError
from paged_backend.param_checks import show

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "triton", "cpu", "reference")
BLOCK_SIZES = (8, 16, 32, 64, 128)
PREEMPTION_MODES = ("auto", "recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
# More threads than any machine has cores: thread libraries crash on absurd counts.
MAX_THREADS = 1024

# vLLM's names for what we call otherwise.
ALIASES = {"num_gpu_blocks_override": "num_kv_blocks"}
# Keys of vLLM deployments that change nothing here: accepted so that an existing file works. Logging is quiet whatever
# they say.
IGNORED = frozenset({"disable_log_requests", "disable_log_stats"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a model to plan memory and check requests.

    `max_position` is the model's context length in tokens; the other fields count layers, KV heads, elements per
    head and vocabulary entries. `eos_token_ids` end a sequence unless the request ignores them. `sliding_window` is how
    many tokens a token attends to in every layer, itself included; None: all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine arguments.

    Args:
        model: directory (safetensors), .gguf file, the demo model's name, or a hub id.
        tokenizer: directory or .gguf file to take the tokenizer from; None: the model's own.
        skip_tokenizer_init: run without a tokenizer: only token ids in, only token ids out.
        dtype: weights and KV cache: `auto` is bfloat16 where the hardware multiplies it, else float32.
        device: `auto` is `cuda` where there is one, else `cpu`.
        block_size: tokens per KV block; None: 16 on a CPU, 64 on a GPU.
        num_kv_blocks: usable blocks of the pool (the null block comes on top); None: from the memory settings.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV, in (0, 1].
        kv_cache_memory_bytes: memory of the KV pool in bytes; None on a CPU: a quarter of the free RAM, at most 4 GiB.
        populate_kv_cache: take all memory of the KV pool from the system when the model loads; a CPU engine otherwise
            takes it when it is first used.
        max_model_len: longest sequence in tokens; None: the model's context length.
        max_num_seqs: sequences in one step at most; None: 64, or less if `max_num_batched_tokens` is smaller.
        max_num_batched_tokens: tokens in one step at most; None: 512 on a CPU, 2048 on a GPU.
        enable_prefix_caching: keep the contents of full blocks and share them between requests with the same beginning.
        scheduling_policy: `fcfs` (first come, first served) or `priority` (the requests' `priority`, lower first).
        long_prefill_token_threshold: longest piece of a prompt computed in one step while other requests want a share
            of it; None: half of `max_num_batched_tokens`, 0: no limit.
        watermark: share of the blocks that admitting a request must leave free for those already running, in [0, 1).
        preemption_mode: what happens to a request whose blocks others need: `recompute`, `swap` to the host, or
            `auto`: the cheaper of the two as measured at start-up. Without swap space all recompute.
        swap_space: GiB of host memory for swapped blocks.
        attention_backend: `auto`, `triton` (Triton-lang), `cpu` (numba) or `reference` (plain torch).
        num_threads: threads of a CPU engine, at most 1024; None: as many as the process may use.
        enforce_eager: on a GPU, launch decode steps kernel by kernel rather than as CUDA graphs.
        async_scheduling: plan a step while the one before is computed, and process its results a step later; the
            results are the same.
        seed: makes requests without a seed reproducible; None: fresh ones each.
        max_waiting_requests: waiting list limit; a request beyond it is refused as overload.
        max_n: most outputs (or beams) of a request; never more than `max_num_seqs`.
        max_logprobs: most log-probabilities per token that a request may ask for.
        max_stop_strings: most stop strings of a request, and most bad words.
        max_stop_length: longest stop string and bad word, in characters.
        max_grammar_length: longest schema, pattern or grammar of `structured_outputs`, in characters.
        grammar_timeout_s: seconds that compiling one may take.
        trust_remote_code: must stay false; code shipped with a model is never run.
        check_integrity: verify every block's state after each step (for debugging).

    Raises:
        ConfigError: a value has the wrong type or is out of bounds; `field` names it.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    populate_kv_cache: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int | None = None
    watermark: float = 0.01
    preemption_mode: str = "auto"
    swap_space: float = 0.0
    attention_backend: str = "auto"
    num_threads: int | None = None
    enforce_eager: bool = False
    async_scheduling: bool = False
    seed: int | None = None
    max_waiting_requests: int = 4096
    max_n: int = 64
    max_logprobs: int = 20
    max_stop_strings: int = 64
    max_stop_length: int = 1024
    max_grammar_length: int = 65536
    grammar_timeout_s: float = 5.0
    trust_remote_code: bool = False
    check_integrity: bool = False

    def __post_init__(self) -> None:
        _check_choice(self, "dtype", DTYPES)
        _check_choice(self, "device", DEVICES)
        _check_choice(self, "attention_backend", ATTENTION_BACKENDS)
        _check_choice(self, "preemption_mode", PREEMPTION_MODES)
        _check_choice(self, "scheduling_policy", SCHEDULING_POLICIES)
        _check_number(self, "swap_space", 0.0, 2.0**20)
        _check_number(self, "watermark", 0.0, 0.99)
        _check_number(self, "grammar_timeout_s", 0.01, 600.0)
        if self.block_size is not None:
            _check_choice(self, "block_size", BLOCK_SIZES)
        for name, low in (
            ("num_kv_blocks", 1),
            ("kv_cache_memory_bytes", 1),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("seed", 0),
            ("max_waiting_requests", 1),
            ("max_n", 1),
            ("max_logprobs", 0),
            ("max_stop_strings", 0),
            ("max_stop_length", 1),
            ("max_grammar_length", 0),
            ("long_prefill_token_threshold", 0),
        ):
            _check_int(self, name, low)
        _check_int(self, "num_threads", 1, MAX_THREADS)
        for name in (field.name for field in fields(self) if isinstance(field.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {show(getattr(self, name))}")
        _check_strings(self)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise _bad("gpu_memory_utilization", f"must be a number in (0, 1], got {show(share)}")
        if self.trust_remote_code:
            raise _bad("trust_remote_code", "must be false: code shipped with a model is never run")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise _bad(
                "max_num_batched_tokens",
                f"({tokens}) must be at least max_num_seqs ({seqs}): every running sequence needs one token a step",
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from a JSON-like mapping (a `model.json`); an unknown key is refused, with the nearest valid one."""
        if not isinstance(values, Mapping):
            raise ConfigError("engine arguments must be a JSON object")
        known = [f.name for f in fields(cls)]
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = ALIASES.get(key, key)
            if name in IGNORED:
                continue
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"engine argument `{key}` is not known{hint}", field=str(key))
            if name in arguments:
                raise ConfigError(f"engine argument `{name}` is given twice (as `{key}` too)", field=name)
            arguments[name] = value
        return cls(**arguments)

    def resolve(
        self, shape: ModelShape, *, device: str, dtype: str, num_kv_blocks: int, block_size: int
    ) -> EngineConfig:
        """Close what was left open, against a loaded model; returns a new configuration.

        Args:
            shape: the model's dimensions.
            device, dtype, num_kv_blocks, block_size: as chosen for this machine.

        Raises:
            ConfigError: `max_model_len` exceeds what the model was made for.
        """
        max_len = shape.max_position if self.max_model_len is None else self.max_model_len
        if max_len > shape.max_position:
            raise _bad("max_model_len", f"({max_len}) exceeds the model's context length of {shape.max_position}")
        tokens = self.max_num_batched_tokens
        if tokens is None:
            tokens = max(512 if device == "cpu" else 2048, self.max_num_seqs or 0)
        seqs = min(64, tokens) if self.max_num_seqs is None else self.max_num_seqs
        threshold = self.long_prefill_token_threshold
        return dataclasses.replace(
            self,
            device=device,
            dtype=dtype,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            max_model_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            long_prefill_token_threshold=max(1, tokens // 2) if threshold is None else threshold,
        )


def kv_block_bytes(shape: ModelShape, block_size: int, dtype: str) -> int:
    """Bytes of one KV block: keys and values of `block_size` tokens in every layer. The one place of the formula."""
    return 2 * block_size * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def _bad(name: str, what: str) -> ConfigError:
    return ConfigError(f"engine argument `{name}` {what}", field=name)


def _check_choice(config: EngineConfig, name: str, choices: tuple) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or value not in choices:
        raise _bad(name, f"must be one of {', '.join(map(str, choices))}; got {show(value)}")


def _check_number(config: EngineConfig, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _bad(name, f"must be a number from {low:g} to {high:g}, got {show(value)}")


def _check_int(config: EngineConfig, name: str, low: int, high: int | None = None) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise _bad(name, f"must be an integer {limit}, got {show(value)}")


def _check_strings(config: EngineConfig) -> None:
    if not isinstance(config.model, str) or not config.model:
        raise _bad("model", f"must be a path or a name, got {show(config.model)}")
    if config.tokenizer is not None and not isinstance(config.tokenizer, str):
        raise _bad("tokenizer", f"must be a path or a name, got {show(config.tokenizer)}")
