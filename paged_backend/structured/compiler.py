"""`GrammarCompiler`: compiles forms of outputs for one tokenizer, off the step loop, and keeps what it has compiled.

The compiler is llguidance, for four reasons. It derives each step's mask from the grammar as it goes, so that compiling
takes milliseconds where other libraries build tables for the whole vocabulary first; every stage has limits, so a
hostile grammar ends in an error; it reads the `tokenizer.json` form of any tokenizer, also of one made from a GGUF
file; and it is one wheel of 3 MB for all Python versions, without dependencies (xgrammar brings the Triton-lang
compiler along).

Knows tokenizers and grammars; no requests and no tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as CompileTimeoutError
from typing import TYPE_CHECKING

from paged_backend.errors import UnsupportedError
from paged_backend.param_checks import bad
from paged_backend.structured.grammars import grammar_text, refused
from paged_backend.structured.state import GrammarState
from paged_backend.structured_params import StructuredOutputs
from paged_backend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHED_GRAMMARS = 64
_THREADS = 2
# States of the lexer take one to two kB each: this bounds what one grammar can come to hold.
_MAX_LEXER_STATES = 50_000


class CompiledGrammar:
    """A compiled form; each output that must have it follows it with a state of its own."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def start(self) -> GrammarState:
        """The state before the first token of an output."""
        with self._lock:
            return GrammarState(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles forms; may be called from any thread.

    Args:
        tokenizer: whose tokens spell the outputs.
        vocab_size: width of the model's logits.
        eos_token_ids: tokens that may follow a complete output.
        timeout_s: seconds that compiling may take.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, timeout_s: float
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="paged-grammar")
        # Made for the first request that needs it: most servers never do.
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """The compiled form, made now or before.

        Raises:
            InvalidRequestError: it does not compile, or not in time.
            UnsupportedError: llguidance is missing or cannot read the tokenizer.
        """
        try:
            text = grammar_text(wanted)
        except ImportError as error:
            raise UnsupportedError(
                "`structured_outputs` needs the package llguidance: pip install llguidance", field="structured_outputs"
            ) from error
        future = self._future(text)
        try:
            return future.result(self._timeout_s)
        except CompileTimeoutError:
            limit = f"{self._timeout_s:g} s (grammar_timeout_s)"
            raise bad("structured_outputs", f"took longer to compile than {limit}: make it simpler") from None

    def close(self) -> None:
        """Stop the threads; nothing can be compiled afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _future(self, text: str) -> Future[CompiledGrammar]:
        with self._lock:
            future = self._made.get(text)
            if future is None or (future.done() and future.exception() is not None):
                future = self._made[text] = self._threads.submit(self._compile, text)
            self._made.move_to_end(text)
            while len(self._made) > _CACHED_GRAMMARS:
                self._made.popitem(last=False)
            return future

    def _compile(self, text: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        vocabulary = self._read_vocabulary()
        try:
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        except Exception as error:  # whatever the library raises is about this form
            raise refused(str(error)) from error
        if matcher.is_error():
            raise refused(matcher.get_error())
        return CompiledGrammar(matcher)

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                    )
                except ValueError as error:
                    message = f"`structured_outputs` does not work with this tokenizer: {error}"
                    raise UnsupportedError(message, field="structured_outputs") from error
            return self._vocabulary
