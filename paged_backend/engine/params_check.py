"""`ParamsCheck`: sampling parameters against what the model, the tokenizer and the configured limits allow.

Beyond refusing, it resolves what the worker needs as token ids. It knows no prompt and no other request, so it may run
on any thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from paged_backend.config import EngineConfig
from paged_backend.errors import InvalidRequestError, UnsupportedError
from paged_backend.param_checks import bad, show
from paged_backend.sampling_params import SamplingParams
from paged_backend.token_rules import TokenRules
from paged_backend.tokenizer import Tokenizer


class ParamsCheck:
    """Checks the parameters of requests.

    Args:
        config: resolved engine arguments, among them the limits of a request.
        vocab_size: entries of the model's vocabulary.
        eos_token_ids: tokens that end a sequence unless its request ignores them.
        tokenizer: None if only token ids are served.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, eos_token_ids: Iterable[int], tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer

    def check(self, params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            InvalidRequestError: a parameter exceeds a limit or names a token that does not exist.
            UnsupportedError: it needs a tokenizer, and there is none.
        """
        self._check_sizes(params)
        for name, ids in (
            ("stop_token_ids", params.stop_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", [token_id for token_id, _ in params.biases]),
        ):
            wrong = next((token_id for token_id in ids if not 0 <= token_id < self._vocab_size), None)
            if wrong is not None:
                raise bad(name, f"names token {show(wrong)}, outside the vocabulary of {self._vocab_size} tokens")
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self._tokenizer is None:
                raise UnsupportedError(f"`{name}` needs a tokenizer, and this engine runs without one", field=name)

    def rules(self, params: SamplingParams) -> TokenRules | None:
        """The request's rules about single tokens; None: there are none."""
        if not (params.allowed_token_ids or params.bad_words or params.min_tokens or params.biases):
            return None
        return TokenRules(
            allowed=tuple(params.allowed_token_ids) if params.allowed_token_ids else None,
            bad_words=self._bad_words(params.bad_words or ()),
            min_tokens=params.min_tokens,
            ending=tuple(sorted(self.ending_ids(params))) if params.min_tokens else (),
            biases=params.biases,
        )

    def ending_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output of such a request."""
        own = frozenset(params.stop_ids)
        return own if params.ignore_eos else own | self._eos_token_ids

    def _check_sizes(self, params: SamplingParams) -> None:
        config = self._config
        assert config.max_num_seqs is not None, "the configuration is resolved"
        rows = "beam_width" if params.use_beam_search else "n"
        _check_most(rows, params.num_rows, config.max_n, "max_n")
        if params.num_rows > config.max_num_seqs:
            limit = f"at most {config.max_num_seqs} sequences run at a time (max_num_seqs)"
            raise InvalidRequestError(f"sampling parameter `{rows}` is {params.num_rows}, but {limit}", field=rows)
        for name in ("logprobs", "prompt_logprobs"):
            _check_most(name, getattr(params, name) or 0, config.max_logprobs, "max_logprobs")
        for name in ("stop", "bad_words"):
            texts = getattr(params, name)
            if len(texts) > config.max_stop_strings:
                limit = f"at most {config.max_stop_strings} strings (max_stop_strings)"
                raise bad(name, f"may hold {limit}, got {len(texts)}")
            if any(len(text) > config.max_stop_length for text in texts):
                raise bad(name, f"must hold strings of 1 to {config.max_stop_length} characters (max_stop_length)")
        if params.structure is not None and params.structure.size > config.max_grammar_length:
            limit = f"at most {config.max_grammar_length} characters (max_grammar_length)"
            raise bad("structured_outputs", f"may have {limit}, got {params.structure.size}")

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, as it is spelled at the start of a text and after a space."""
        assert self._tokenizer is not None or not words
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                assert self._tokenizer is not None
                ids = tuple(self._tokenizer.encode(_checked_text(text), add_special_tokens=False))
                if ids:
                    found[ids] = None
        for ids in found:
            if max(ids) >= self._vocab_size:
                raise bad("bad_words", "holds a word that the tokenizer spells with tokens the model does not have")
        return tuple(found)


def _check_most(name: str, value: int, most: int, limit: str) -> None:
    if value > most:
        raise bad(name, f"may be at most {most} ({limit}), got {show(value)}")


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad("bad_words", f"holds a string that is not valid Unicode: {error}") from error
    return text
