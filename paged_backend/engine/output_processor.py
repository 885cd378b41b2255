"""`OutputProcessor`: appends sampled tokens to their sequences, decides what ends, and makes the deltas.

It knows token ids, text, forms and limits; it knows no blocks and no tensors. The engine tells it which requests live.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from paged_backend.engine.beam_search import Hypothesis
from paged_backend.engine.detokenizer import OutputText
from paged_backend.engine.outputs import Logprob, SequenceDelta
from paged_backend.request import FinishReason, Request, Sequence
from paged_backend.sched.output import ScheduledSequence, TokenLogprobs
from paged_backend.structured.state import GrammarState
from paged_backend.tokenizer import Tokenizer

# JSON has no infinity: a sum of log-probabilities stays within float32, as each of them does.
_LOWEST = -3.4028234663852886e38
_STUCK = "the request's parameters leave no token to go on with"


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
        # Log-probability of each output so far, of the sequences that asked for log-probabilities.
        self._cumulative: dict[int, float] = {}
        # Of the requests that asked for them, by request: those of the prompt tokens, until they are handed out.
        self._prompts: dict[str, list[dict[int, Logprob] | None]] = {}
        # How far each output that must have a form has come.
        self._states: dict[int, GrammarState] = {}

    def add(self, request: Request) -> None:
        """Start following a request."""
        for sequence in request.sequences:
            if self._tokenizer is not None and request.params.detokenize and not request.params.use_beam_search:
                self._texts[sequence.seq_id] = OutputText(self._tokenizer, request.params)
            if request.grammar is not None:
                self._states[sequence.seq_id] = request.grammar.start()
        if request.num_prompt_logprobs is not None:
            self._prompts[request.request_id] = [None]

    def remove(self, request: Request) -> None:
        """Forget a request."""
        for sequence in request.sequences:
            self._texts.pop(sequence.seq_id, None)
            self._cumulative.pop(sequence.seq_id, None)
            self._states.pop(sequence.seq_id, None)
        self._prompts.pop(request.request_id, None)

    def token_masks(self, plan: Iterable[ScheduledSequence]) -> dict[int, bytes]:
        """Which tokens may follow, for the sequences of a plan that sample and must have a form."""
        if not self._states:
            return {}
        sampling = (seq_id for item in plan for seq_id in item.samples)
        return {seq_id: self._states[seq_id].mask() for seq_id in sampling if seq_id in self._states}

    def add_prompt_logprobs(self, request: Request, start: int, found: list[TokenLogprobs]) -> None:
        """Take in log-probabilities of the prompt from position `start` on; what is known already changes nothing."""
        position = request.num_known_prompt_logprobs
        for report in found[position - start :]:
            position += 1
            token_id = request.prompt_token_ids[position]
            self._prompts[request.request_id].append(self._readable(token_id, report, request.params.detokenize))
        request.num_known_prompt_logprobs = position

    def append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceDelta:
        """Add a sampled token; sets `sequence.finish` if it ends the sequence, and returns the delta."""
        request = sequence.request
        sequence.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        if self._ends_output(token_id, request):
            sequence.finish = FinishReason("stop", None if self._is_eos(token_id, request) else token_id)
        elif self._states:
            sequence.finish = self._finish_by_form(sequence, token_id)
        if sequence.finish is None and sequence.num_tokens >= request.max_total_tokens:
            sequence.finish = FinishReason("length")
        text_state = self._texts.get(sequence.seq_id)
        text = ""
        if text_state is not None:
            text = self._append_text(sequence, token_id, text_state)
        if logprobs is not None:
            total = self._cumulative.get(sequence.seq_id, 0.0) + logprobs.logprob
            self._cumulative[sequence.seq_id] = max(total, _LOWEST)
        readable = None if logprobs is None else [self._readable(token_id, logprobs, request.params.detokenize)]
        return self._delta(sequence, [token_id], text, text_state, readable)

    def end(self, sequence: Sequence, reason: FinishReason) -> SequenceDelta:
        """End a sequence from outside (abort, timeout); releases the text held back."""
        sequence.finish = reason
        text_state = self._texts.get(sequence.seq_id)
        text = text_state.finish()[0] if text_state is not None else ""
        return self._delta(sequence, [], text, text_state, None)

    def end_stuck(self, sequence: Sequence) -> SequenceDelta:
        """End a sequence for which no token may follow."""
        state = self._states.get(sequence.seq_id)
        return self.end(sequence, FinishReason("error", (state and state.error) or _STUCK))

    def beam_results(self, request: Request, best: list[Hypothesis]) -> list[SequenceDelta]:
        """The outputs of a finished beam search, best first, one delta each."""
        deltas = []
        for index, found in enumerate(best):
            text, span = "", None
            if self._tokenizer is not None and request.params.detokenize:
                text_state = OutputText(self._tokenizer, request.params)
                ended_by_token = found.finish.kind == "stop" and not request.params.include_stop_str_in_output
                spelled = found.token_ids[:-1] if ended_by_token else found.token_ids
                text = "".join(text_state.append(token_id)[0] for token_id in spelled) + text_state.finish()[0]
                span = text_state.span(len(text))
            deltas.append(
                SequenceDelta(
                    request_id=request.request_id,
                    index=index,
                    token_ids=found.token_ids,
                    text=text,
                    span=span,
                    finish_reason=found.finish.kind,
                    stop_reason=found.finish.stop_reason,
                    request_finished=index == len(best) - 1,
                    score=found.score,
                    cumulative_logprob=found.cumulative_logprob,
                )
            )
        return deltas

    def _finish_by_form(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """An output ends when its form is complete; no end-of-sequence token is waited for."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            return None
        state.accept(token_id)
        if state.error is not None:
            return FinishReason("error", state.error)
        return FinishReason("stop") if state.is_complete else None

    def _append_text(self, sequence: Sequence, token_id: int, text_state: OutputText) -> str:
        """The text that a token releases; a stop string it completes ends the sequence."""
        params = sequence.request.params
        # A stop token ends the output without being part of its text, as a stop string does.
        stopped = self._ends_output(token_id, sequence.request)
        text, stop = "", None
        if not stopped or params.include_stop_str_in_output:
            text, stop = text_state.append(token_id)
        if stop is None and sequence.finish is not None:
            rest, stop = text_state.finish()
            text += rest
        # A stop string completed by the very last token names the reason; an end-of-sequence token goes before it.
        if stop is not None and not stopped:
            sequence.finish = FinishReason("stop", stop)
        return text

    def _ends_output(self, token_id: int, request: Request) -> bool:
        return token_id in request.stop_ids or self._is_eos(token_id, request)

    def _is_eos(self, token_id: int, request: Request) -> bool:
        return token_id in self._eos_token_ids and not request.params.ignore_eos

    def _readable(self, token_id: int, found: TokenLogprobs, detokenize: bool) -> dict[int, Logprob]:
        position = {token_id: self._logprob(token_id, found.logprob, found.rank, detokenize)}
        for rank, (top_id, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), start=1):
            if top_id not in position:
                position[top_id] = self._logprob(top_id, logprob, rank, detokenize)
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int, detokenize: bool) -> Logprob:
        decoded = None
        if detokenize and self._tokenizer is not None:
            decoded = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob, rank, decoded)

    def _delta(
        self,
        sequence: Sequence,
        token_ids: list[int],
        text: str,
        state: OutputText | None,
        logprobs: list[dict[int, Logprob]] | None,
    ) -> SequenceDelta:
        finish = sequence.finish
        prompt = None
        if token_ids and self._prompts:
            prompt = self._prompts.pop(sequence.request.request_id, None)
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            span=state.span(len(text)) if state is not None else None,
            finish_reason=finish.kind if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            request_finished=finish is not None and not sequence.request.live_sequences(),
            logprobs=logprobs,
            cumulative_logprob=self._cumulative.get(sequence.seq_id),
            prompt_logprobs=prompt,
        )
