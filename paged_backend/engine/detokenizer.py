"""From tokens, one by one, to text deltas that join to the whole text exactly, and stop strings.

`IncrementalDetokenizer` turns tokens into text; `OutputText` releases that text except for what might yet become a
stop string. Neither knows requests or the engine.

The window. Decoding a token alone loses leading spaces and splits characters, so a short window of the output is
decoded instead, twice:

    token ids   ... | prefix ........ read | ........... end
                     \\____ known text ____/ \\___ new ___/

The text of [prefix, end) minus the text of [prefix, read) is new. While it ends in U+FFFD a character is incomplete
and nothing is taken. (The idea is that of Text Generation Inference and vLLM.)
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from paged_backend.engine.outputs import TextSpan
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class _Piece(NamedTuple):
    """Text taken in one go: at `offset` of the whole text, found at `known` of the decoded tokens [prefix, end)."""

    offset: int
    prefix: int
    end: int
    known: int


class IncrementalDetokenizer:
    """Text of one growing output.

    Args:
        tokenizer: decodes token ids.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: if false, an added token right after another one is written without the space
            that some tokenizers put before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._joins_special_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._length = 0
        self._pieces: deque[_Piece] = deque()

    def append(self, token_id: int) -> str:
        """Add one token; returns the text it completes, "" while a character is incomplete."""
        self._token_ids.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """The text of what is still incomplete, as the tokenizer decodes it; for the end of the output."""
        return self._take(final=True)

    def span(self, start: int, end: int) -> TextSpan:
        """Where a stateless detokenizer finds characters `start` to `end` of the text; earlier ones are forgotten."""
        while len(self._pieces) > 1 and self._pieces[1].offset <= start:
            self._pieces.popleft()
        first = self._pieces[0]
        last = next(piece for piece in reversed(self._pieces) if piece.offset < end)
        skip = first.known + start - first.offset
        return TextSpan(self._token_ids[first.prefix : last.end], skip, skip + end - start)

    def _take(self, *, final: bool) -> str:
        known = self._decode(self._prefix, self._read)
        window = self._decode(self._prefix, len(self._token_ids))
        if len(window) <= len(known) or (window.endswith(_REPLACEMENT) and not final):
            return ""
        begin = len(known) + self._needless_space(window[len(known) :])
        self._pieces.append(_Piece(self._length, self._prefix, len(self._token_ids), begin))
        self._prefix, self._read = self._read, len(self._token_ids)
        self._length += len(window) - begin
        return window[begin:]

    def _needless_space(self, new: str) -> int:
        """Length of the space to drop before the last token."""
        if not self._joins_special_tokens or len(self._token_ids) < 2:
            return 0
        before, text = (self._tokenizer.added_token(token_id) for token_id in self._token_ids[-2:])
        return 1 if before is not None and text is not None and new == " " + text else 0

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens)


class _StopMatcher:
    """Looks for a stop string in a text that comes character by character.

    The way of Knuth, Morris and Pratt (1977): each character is looked at once, however long the string is and however
    often it begins.

    Attributes:
        text: the stop string.
        matched: how many of its characters the text now ends with, at most all.
    """

    __slots__ = ("_fallbacks", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallbacks = _fallbacks(text)

    def add(self, char: str) -> bool:
        """Take in one character; true if it completes the string, after which there is nothing more to look for."""
        self.matched = _longest_match(self.text, self._fallbacks, self.matched, char)
        return self.matched == len(self.text)


@lru_cache(maxsize=1024)
def _fallbacks(text: str) -> list[int]:
    """At each character: how long a shorter beginning of the text ends there."""
    found = [0]
    for char in text[1:]:
        found.append(_longest_match(text, found, found[-1], char))
    return found


def _longest_match(text: str, fallbacks: list[int], matched: int, char: str) -> int:
    """How many characters are matched after `char`, of which `matched` were before it."""
    while matched and text[matched] != char:
        matched = fallbacks[matched - 1]
    return matched + 1 if text[matched] == char else 0


class OutputText:
    """The text of one output as the client sees it: whole characters, nothing of a stop string (unless asked for).

    Args:
        tokenizer: decodes token ids.
        params: stop strings and what to leave out.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stops = [_StopMatcher(text) for text in params.stop_strings]
        # Text of tokens that come before the output may stop is never matched, as in vLLM.
        self._num_unmatched = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._held = ""
        self._released = 0

    def append(self, token_id: int) -> tuple[str, str | None]:
        """Add one token; returns the text released by it and the stop string it completed, if any."""
        piece = self._detokenizer.append(token_id)
        if self._num_unmatched > 0:
            self._num_unmatched -= 1
            self._released += len(piece)
            return piece, None
        return self._release(piece)

    def finish(self) -> tuple[str, str | None]:
        """Release everything that was held back; returns the text and a stop string if that completed one."""
        text, stop = self._release(self._detokenizer.flush())
        if stop is not None:
            return text, stop
        held, self._held = self._held, ""
        self._released += len(held)
        return text + held, None

    def span(self, length: int) -> TextSpan | None:
        """Where a stateless detokenizer finds the last `length` released characters; None for none."""
        if length == 0:
            return None
        return self._detokenizer.span(self._released - length, self._released)

    def _release(self, piece: str) -> tuple[str, str | None]:
        match = self._first_stop(piece) if self._stops else None
        text = self._held + piece
        if match is not None:
            end, stop = match
            end += len(self._held)
            text, self._held = text[: end if self._include_stop else end - len(stop)], ""
            self._released += len(text)
            return text, stop
        keep = max((stop.matched for stop in self._stops), default=0)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._released += len(text)
        return text, None

    def _first_stop(self, piece: str) -> tuple[int, str] | None:
        """Where in the piece the first match ends, and its stop string: of several that end there, the longest."""
        for position, char in enumerate(piece):
            found = [stop.text for stop in self._stops if stop.add(char)]
            if found:
                return position + 1, max(found, key=len)
        return None
