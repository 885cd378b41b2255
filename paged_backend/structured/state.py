"""`GrammarState`: how far one output has come in the form that it must have. Knows token ids; no requests, no text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """Follows one output. It depends on the output's tokens alone, so preemption does not touch it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why no token can follow, or None: the output left the form, or following it became too costly."""
        return " ".join(self._matcher.get_error().split())[:300] if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """True when the output has the form and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        """Take in the output's next token."""
        self._matcher.consume_token(token_id)

    def mask(self) -> bytes:
        """The tokens that may follow: a bit per token, lowest bit first, padded with zeros; none after an error."""
        mask = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask
