"""`OutputProcessor`: appends sampled tokens to their sequences, decides what ends, and makes the deltas.

It knows token ids, text and limits; it knows no blocks and no tensors. The engine tells it which requests live.
"""

from __future__ import annotations

import time

from paged_backend.engine.detokenizer import OutputText
from paged_backend.engine.outputs import SequenceDelta
from paged_backend.request import FinishReason, Request, Sequence
from paged_backend.tokenizer import Tokenizer


class OutputProcessor:
    """Per-sequence output state of the live requests.

    Args:
        tokenizer: None for token ids only: no text, no stop strings.
        eos_token_ids: tokens that end a sequence unless its request ignores them.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[int, OutputText] = {}

    def add(self, request: Request) -> None:
        """Start following a request."""
        if self._tokenizer is not None:
            for sequence in request.sequences:
                self._texts[sequence.seq_id] = OutputText(self._tokenizer, request.params)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        for sequence in request.sequences:
            self._texts.pop(sequence.seq_id, None)

    def append(self, sequence: Sequence, token_id: int) -> SequenceDelta:
        """Add a sampled token; sets `sequence.finish` if it ends the sequence, and returns the delta."""
        request = sequence.request
        sequence.token_ids.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        sequence.finish = self._finish_by_token(sequence, token_id)
        text_state = self._texts.get(sequence.seq_id)
        if text_state is None:
            return self._delta(sequence, [token_id], "", None)
        return self._append_text(sequence, token_id, text_state)

    def end(self, sequence: Sequence, reason: FinishReason) -> SequenceDelta:
        """End a sequence from outside (abort, error); releases the text held back."""
        sequence.finish = reason
        text_state = self._texts.get(sequence.seq_id)
        text = text_state.finish()[0] if text_state is not None else ""
        return self._delta(sequence, [], text, text_state)

    def _finish_by_token(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason("stop")
        if token_id in params.stop_ids:
            return FinishReason("stop", token_id)
        if sequence.num_tokens >= sequence.request.max_total_tokens:
            return FinishReason("length")
        return None

    def _append_text(self, sequence: Sequence, token_id: int, text_state: OutputText) -> SequenceDelta:
        # A stop token ends the output without being part of its text, as a stop string does.
        stopped = sequence.finish is not None and sequence.finish.kind == "stop"
        text, stop = "", None
        if not stopped or sequence.request.params.include_stop_str_in_output:
            text, stop = text_state.append(token_id)
        if stop is None and sequence.finish is not None:
            rest, stop = text_state.finish()
            text += rest
        # A stop string completed by the very last token names the reason; an end-of-sequence token goes before it.
        if stop is not None and not stopped:
            sequence.finish = FinishReason("stop", stop)
        return self._delta(sequence, [token_id], text, text_state)

    def _delta(self, sequence: Sequence, token_ids: list[int], text: str, state: OutputText | None) -> SequenceDelta:
        finish = sequence.finish
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            span=state.span(len(text)) if state is not None else None,
            finish_reason=finish.kind if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            request_finished=not sequence.request.live_sequences(),
        )
