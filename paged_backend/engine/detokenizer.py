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
        self._stops = params.stop_strings
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
        text = self._held + piece
        match = self._first_stop(text)
        if match is not None:
            start, stop = match
            text, self._held = text[: start + len(stop) if self._include_stop else start], ""
            self._released += len(text)
            return text, stop
        keep = self._possible_stop(text)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._released += len(text)
        return text, None

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Start of the match that is complete first, and its stop string."""
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
