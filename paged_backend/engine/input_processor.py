"""`InputProcessor`: from a client's prompt and parameters to a `Request` that can certainly be served, or an error.

It knows the limits of the model, the context and the block pool; it knows no other requests, so it may run on any
thread.
"""

from __future__ import annotations

import operator
import random
import secrets
import time

from paged_backend.config import EngineConfig, ModelShape
from paged_backend.engine.beam_search import num_candidates
from paged_backend.engine.params_check import ParamsCheck
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.param_checks import bad, show
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.structured.compiler import GrammarCompiler
from paged_backend.tokenizer import Tokenizer

_SEED_MASK = 2**64 - 1


class InputProcessor:
    """Tokenizes and checks requests.

    Args:
        config: resolved engine arguments.
        shape: the model's dimensions.
        tokenizer: None if only token ids are served.
    """

    def __init__(self, config: EngineConfig, shape: ModelShape, tokenizer: Tokenizer | None) -> None:
        assert config.max_model_len, "the configuration is resolved"
        self._max_model_len = config.max_model_len
        self._capacity = _Capacity(config, shape.sliding_window)
        self._vocab_size = shape.vocab_size
        self._tokenizer = tokenizer
        self._check = ParamsCheck(config, shape.vocab_size, shape.eos_token_ids, tokenizer)
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(
                tokenizer, shape.vocab_size, shape.eos_token_ids, timeout_s=config.grammar_timeout_s
            )
        # `seed` makes the seeds of unseeded requests a fixed series.
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()

    def make_request(
        self, request_id: str, prompt: str | list[int], params: SamplingParams, *, field: str, timeout_s: float | None
    ) -> Request:
        """See `Engine.make_request`."""
        self._check.check(params)
        text, token_ids = self._token_ids(prompt, field)
        if not token_ids:
            raise InvalidRequestError(f"`{field}` is empty: give at least one token", field=field)
        token_ids = self._truncated(token_ids, params)
        max_total_tokens = self._max_total_tokens(len(token_ids), params, field)
        grammar = None
        if params.structure is not None:
            assert self._grammars is not None, "checked with the parameters"
            grammar = self._grammars.compile(params.structure)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & _SEED_MASK
        return Request(
            request_id,
            token_ids,
            params,
            seed=seed,
            max_total_tokens=max_total_tokens,
            prompt=text,
            num_sequences=1 if params.use_beam_search else params.n,
            priority=params.priority,
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            cache_salt=params.cache_salt,
            num_logprobs=self._num_logprobs(params),
            num_prompt_logprobs=params.prompt_logprobs,
            rules=self._check.rules(params),
            grammar=grammar,
        )

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output of such a request."""
        return self._check.ending_ids(params)

    def close(self) -> None:
        """Stop the compiler's threads."""
        if self._grammars is not None:
            self._grammars.close()

    def _num_logprobs(self, params: SamplingParams) -> int | None:
        if not params.use_beam_search:
            return params.logprobs
        return min(self._vocab_size, num_candidates(params.num_rows, len(self.stop_token_ids(params))))

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The end of the prompt, as long as the request wants it; a begin-of-sequence token stays in front."""
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            most = max(1, self._max_model_len - (params.max_tokens or 1))
        elif most >= self._max_model_len:
            limit = f"the context of {self._max_model_len} tokens (max_model_len)"
            raise bad("truncate_prompt_tokens", f"must be less than {limit}, got {show(most)}")
        if len(token_ids) <= most:
            return token_ids
        begin = None if self._tokenizer is None else self._tokenizer.bos_token_id
        if most > 1 and token_ids[0] == begin:
            return [token_ids[0], *token_ids[1 - most :]]
        return token_ids[-most:]

    def _token_ids(self, prompt: str | list[int], field: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise UnsupportedError(f"`{field}`: this engine runs without a tokenizer; give token ids", field=field)
            return prompt, self._encode(prompt, field)
        if not isinstance(prompt, (list, tuple)):
            raise InvalidRequestError(f"`{field}` must be a string or a list of token ids", field=field)
        self._check_length(len(prompt), field)
        return None, [self._token_id(item, f"`{field}`[{position}]", field) for position, item in enumerate(prompt)]

    def _token_id(self, item: object, name: str, field: str) -> int:
        """`item` as a plain integer; numpy's are integers too."""
        try:
            token_id = None if isinstance(item, bool) else operator.index(item)  # type: ignore[arg-type]
        except TypeError:
            token_id = None
        if token_id is None:
            raise InvalidRequestError(f"{name} is not an integer token id", field=field)
        if not 0 <= token_id < self._vocab_size:
            limit = f"outside the vocabulary of {self._vocab_size} tokens"
            raise InvalidRequestError(f"{name} = {token_id!r:.40} is {limit}", field=field)
        return token_id

    def _encode(self, prompt: str, field: str) -> list[int]:
        if not prompt:
            return []
        assert self._tokenizer is not None
        return self._tokenizer.encode_prompt(prompt, self._max_model_len, field)

    def _check_length(self, num_prompt: int, field: str) -> None:
        if num_prompt >= self._max_model_len:
            raise InvalidRequestError(
                f"`{field}` has {num_prompt} tokens; the context of {self._max_model_len} tokens (max_model_len) must "
                "hold the prompt and at least one new token",
                field=field,
            )

    def _max_total_tokens(self, num_prompt: int, params: SamplingParams, field: str) -> int:
        """Prompt plus output at which a sequence ends. The last token needs no slot: nothing follows it."""
        self._check_length(num_prompt, field)
        rows, capacity = params.num_rows, self._capacity
        if capacity.blocks_needed(num_prompt, num_prompt, 1) > capacity.num_blocks:
            raise InvalidRequestError(
                f"`{field}` has {num_prompt} tokens and can never fit the pool of {capacity}", field=field
            )
        if params.max_tokens is None:
            return min(self._max_model_len, capacity.longest(num_prompt, rows) + 1)
        total = min(num_prompt + params.max_tokens, self._max_model_len)
        needed = capacity.blocks_needed(num_prompt, total - 1, rows)
        if needed > capacity.num_blocks:
            outputs = "" if rows == 1 else f" and {rows} outputs side by side"
            raise InvalidRequestError(
                f"`{field}` of {num_prompt} tokens with `max_tokens` {params.max_tokens}{outputs} needs {needed} KV "
                f"blocks and can never fit the pool of {capacity}",
                field="max_tokens",
            )
        return total


class _Capacity:
    """What the pool can hold for one request that has it to itself."""

    def __init__(self, config: EngineConfig, sliding_window: int | None) -> None:
        assert config.num_kv_blocks and config.block_size and config.max_num_batched_tokens
        self.num_blocks = config.num_kv_blocks
        self._block_size = config.block_size
        # Behind a window blocks are released, but not those that the tokens of one step still attend to.
        window_tokens = None if sliding_window is None else sliding_window + config.max_num_batched_tokens
        self._most_per_sequence = None if window_tokens is None else self._blocks_for(window_tokens) + 1

    def __str__(self) -> str:
        slots = self.num_blocks * self._block_size
        return f"{self.num_blocks} blocks x {self._block_size} tokens = {slots} KV slots"

    def blocks_needed(self, num_prompt: int, num_tokens: int, num_rows: int) -> int:
        """Blocks of `num_rows` sequences of `num_tokens` tokens that share their prompt's full blocks."""
        shared = num_prompt // self._block_size if num_rows > 1 else 0
        own = self._blocks_for(num_tokens) - shared
        if self._most_per_sequence is not None:
            shared, own = min(shared, self._most_per_sequence), min(own, self._most_per_sequence)
        return shared + num_rows * own

    def longest(self, num_prompt: int, num_rows: int) -> int:
        """Tokens that each of the sequences can have."""
        shared = num_prompt // self._block_size if num_rows > 1 else 0
        own = (self.num_blocks - shared) // num_rows
        if self._most_per_sequence is not None and own >= self._most_per_sequence:
            return 2**62
        return (shared + own) * self._block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
