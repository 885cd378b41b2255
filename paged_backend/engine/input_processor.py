"""`InputProcessor`: from a client's prompt and parameters to a `Request` that can certainly be served, or an error.

It knows the limits of the model, the context and the block pool; it knows no other requests, so it may run on any
thread.
"""

from __future__ import annotations

import random
import secrets

from paged_backend.config import EngineConfig, ModelShape
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
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
        assert config.max_model_len and config.num_kv_blocks and config.block_size, "the configuration is resolved"
        self._max_model_len = config.max_model_len
        self._num_blocks = config.num_kv_blocks
        self._block_size = config.block_size
        self._vocab_size = shape.vocab_size
        self._tokenizer = tokenizer
        # `seed` makes the seeds of unseeded requests a fixed series.
        self._seeds = random.Random(config.seed) if config.seed is not None else secrets.SystemRandom()

    def make_request(self, request_id: str, prompt: str | list[int], params: SamplingParams, *, field: str) -> Request:
        """See `Engine.make_request`."""
        text, token_ids = self._token_ids(prompt, field)
        if not token_ids:
            raise InvalidRequestError(f"`{field}` is empty: give at least one token", field=field)
        if params.stop and self._tokenizer is None:
            raise UnsupportedError("`stop` needs a tokenizer, and this engine runs without one", field="stop")
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & _SEED_MASK
        return Request(
            request_id,
            token_ids,
            params,
            seed=seed,
            max_total_tokens=self._max_total_tokens(len(token_ids), params.max_tokens, field),
            prompt=text,
        )

    def _token_ids(self, prompt: str | list[int], field: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise UnsupportedError(f"`{field}`: this engine runs without a tokenizer; give token ids", field=field)
            return prompt, self._encode(prompt, field)
        if not isinstance(prompt, (list, tuple)):
            raise InvalidRequestError(f"`{field}` must be a string or a list of token ids", field=field)
        for position, token_id in enumerate(prompt):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(f"`{field}`[{position}] is not an integer token id", field=field)
            if not 0 <= token_id < self._vocab_size:
                limit = f"outside the vocabulary of {self._vocab_size} tokens"
                raise InvalidRequestError(f"`{field}`[{position}] = {token_id} is {limit}", field=field)
        return None, list(prompt)

    def _encode(self, prompt: str, field: str) -> list[int]:
        if not prompt:
            return []
        # Lone surrogates are the one thing a Python string can hold that is not text.
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"`{field}` is not valid Unicode: {error}", field=field) from error
        assert self._tokenizer is not None
        return self._tokenizer.encode(prompt)

    def _max_total_tokens(self, num_prompt: int, max_tokens: int | None, field: str) -> int:
        """Prompt plus output at which the sequence ends. The last token needs no slot: nothing follows it."""
        if num_prompt >= self._max_model_len:
            raise InvalidRequestError(
                f"`{field}` has {num_prompt} tokens; the context of {self._max_model_len} tokens (max_model_len) must "
                "hold the prompt and at least one new token",
                field=field,
            )
        pool_slots = self._num_blocks * self._block_size
        pool = f"{self._num_blocks} blocks x {self._block_size} tokens = {pool_slots} KV slots"
        if num_prompt > pool_slots:
            raise InvalidRequestError(
                f"`{field}` has {num_prompt} tokens and can never fit the pool of {pool}", field=field
            )
        if max_tokens is None:
            return min(self._max_model_len, pool_slots + 1)
        total = min(num_prompt + max_tokens, self._max_model_len)
        if total - 1 > pool_slots:
            raise InvalidRequestError(
                f"`{field}` of {num_prompt} tokens with `max_tokens` {max_tokens} needs {total - 1} KV slots and can "
                f"never fit the pool of {pool}",
                field="max_tokens",
            )
        return total
