"""`TokenRules`: a request's rules about single tokens, resolved against a model: token ids only, no text.

Made by the engine, applied by the sampler; sent along with each new row. Knows no tensors and no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens may follow, and what their logits gain; every id is in the model's vocabulary.

    Attributes:
        allowed: the only tokens that may be generated; None: all.
        bad_words: sequences of tokens; the last of one may not follow the others in the output.
        min_tokens: so many tokens must be generated before one of `ending`.
        ending: tokens that end an output.
        biases: (token id, what is added to its logit), no id twice.
    """

    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ending: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
