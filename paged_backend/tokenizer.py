"""`Tokenizer`: text to token ids and back, from a Hugging Face directory or from the vocabulary inside a GGUF file.

Built on the `tokenizers` library alone: it imports no torch and no transformers, so the tokenizer models of the
server start in seconds. It knows nothing of requests, of streaming (see the engine's incremental detokenizer) or of
chat roles (see chat.py); a chat template is only handed out as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from paged_backend.errors import InvalidRequestError, ModelLoadError
from paged_backend.model_files import GGUFFile, find_eos_token_ids, read_gguf, read_optional_json
from paged_backend.model_source import ModelSource
from paged_backend.param_checks import show

# Token kinds of `tokenizer.ggml.token_type` that are matched whole in the text before the BPE runs.
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Word patterns of the published tokenizers (Llama 3's takes digits in threes, Qwen2's one by one).
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCEPIECE_SPACE = "\u2581"


class Tokenizer:
    """A loaded tokenizer. Every method may be called from any thread at the same time.

    Attributes:
        vocab_size: token ids are below this number (added tokens included).
        max_token_length: no token stands for more characters than this.
        eos_token_ids: ids that end a sequence, by the generation config or the GGUF metadata.
        bos_token_id: the id that begins a sequence, None if there is none.
        chat_template: the model's Jinja chat template as text, None if it has none.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        chat_template: str | None,
    ) -> None:
        # Truncation or padding saved with a tokenizer would silently cut or lengthen prompts.
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._added = {token_id: token.content for token_id, token in rust.get_added_tokens_decoder().items()}
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        # The highest id counts, not the number of entries: a vocabulary may have holes.
        vocab = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_length = max(map(len, vocab), default=0)

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """Load the tokenizer of a model.

        Raises:
            ModelLoadError: there is none, or it is of a kind that cannot be reproduced exactly; the message names it.
        """
        return _from_gguf(source) if source.is_gguf else _from_directory(source)

    @property
    def bos_token(self) -> str | None:
        """The text of `bos_token_id`."""
        return None if self.bos_token_id is None else self._rust.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the first of `eos_token_ids`."""
        return self._rust.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text become their ids.

        With `add_special_tokens` the model's template is applied (a begin-of-sequence id where the model wants one).
        A text that already begins with that token, as rendered chat templates do, does not get it twice.
        """
        # A batch of one: other than `encode` it lets other threads run, which a long text would stop for seconds.
        ids = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def encode_prompt(self, text: str, max_model_len: int, field: str) -> list[int]:
        """Token ids of a client's prompt, which came in as `field`; they may still be more than `max_model_len`.

        Raises:
            InvalidRequestError: it is no valid Unicode, or not even the longest tokens would make it fit a context of
                `max_model_len` tokens. That is told without tokenizing, which takes seconds for megabytes.
        """
        limit = max_model_len * self.max_token_length
        if len(text) > limit:
            raise InvalidRequestError(
                f"`{field}` has {len(text)} characters; a context of {max_model_len} tokens (max_model_len) "
                f"can never hold more than {limit}",
                field=field,
            )
        # Lone surrogates are the one thing a Python string can hold that is not text.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"`{field}` is not valid Unicode: {error}", field=field) from error
        return self.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, exactly as the tokens spell it (no clean-up of spaces before punctuation).

        An id beyond the vocabulary spells nothing.

        Raises:
            InvalidRequestError: an id is negative or wider than 32 bits.
        """
        try:
            return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(i for i in ids if not 0 <= i < 2**32)
            raise InvalidRequestError(f"{show(wrong)} is no token id: ids are 0 or more", field="token_ids") from error

    def added_token(self, token_id: int) -> str | None:
        """The text of a token that was added to the vocabulary (every special one was), None for any other."""
        return self._added.get(token_id)

    def to_json(self) -> str:
        """The tokenizer in the form of a `tokenizer.json`."""
        return self._rust.to_str()


# ---- Hugging Face directories -------------------------------------------------------------------------------------


def _from_directory(source: ModelSource) -> Tokenizer:
    path = source.path
    config = read_optional_json(path / "tokenizer_config.json")
    names = {**_token_names(read_optional_json(path / "special_tokens_map.json")), **_token_names(config)}
    rust = _read_rust(path)
    _add_missing_tokens(rust, config, names)
    if "add_bos_token" in config or "add_eos_token" in config:
        # An explicit wish overrides the saved post-processor (as transformers does).
        begins = names.get("bos_token") if config.get("add_bos_token") else None
        ends = names.get("eos_token") if config.get("add_eos_token") else None
        _set_template(rust, begins, ends)
    eos_ids = find_eos_token_ids(source)
    if not eos_ids and names.get("eos_token"):
        eos_ids = tuple(i for i in [rust.token_to_id(names["eos_token"])] if i is not None)
    bos_token = names.get("bos_token")
    return Tokenizer(
        rust,
        eos_token_ids=eos_ids,
        bos_token_id=rust.token_to_id(bos_token) if bos_token else None,
        chat_template=_chat_template(path, config),
    )


def _read_rust(path: Path) -> RustTokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return RustTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelLoadError(f"cannot read {file}: {error}", field="tokenizer") from error
    if any((path / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        return _converted(path)
    raise ModelLoadError(f"{path} holds no tokenizer.json (nor a tokenizer.model or vocab.json)", field="tokenizer")


def _converted(path: Path) -> RustTokenizer:
    """Older checkpoints without a tokenizer.json: transformers can convert them; it is imported for these alone."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False).backend_tokenizer
    except Exception as error:  # missing package, missing sentencepiece, unknown class: all mean the same here
        raise ModelLoadError(
            f"{path} has no tokenizer.json, and its older tokenizer files could not be converted ({error}); convert "
            "once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)), with sentencepiece "
            "installed",
            field="tokenizer",
        ) from error


def _token_names(config: dict[str, Any]) -> dict[str, str]:
    """Contents of the named special tokens (`bos_token`, ...), which are strings or serialised AddedTokens."""
    names = {}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, (str, dict)):
            names[key] = value if isinstance(value, str) else str(value.get("content", ""))
    return {key: name for key, name in names.items() if name}


def _add_missing_tokens(rust: RustTokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json lists, at the ids it gives them."""
    present = rust.get_added_tokens_decoder()
    special = set(names.values())
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted((int(i), entry) for i, entry in listed.items()):
        if token_id in present:
            continue
        content = entry["content"]
        options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        rust.add_tokens([AddedToken(content, special=entry.get("special", False) or content in special, **options)])
        if rust.token_to_id(content) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json leads to "
                f"{rust.token_to_id(content)}",
                field="tokenizer",
            )
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    # Named special tokens that are plain vocabulary entries become special; new ids are never invented.
    fresh = [name for name in special - known if rust.token_to_id(name) is not None]
    rust.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(fresh)])


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the one for plain chats
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def _from_gguf(source: ModelSource) -> Tokenizer:
    gguf = read_gguf(source.path)
    metadata = gguf.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelLoadError(f"{source.path} carries no tokenizer", field="tokenizer")
    if kind == "gpt2":
        rust = _byte_level_bpe(gguf, tokens)
    elif kind == "llama":
        rust = _sentencepiece_bpe(gguf, tokens)
    else:
        raise ModelLoadError(
            f"the GGUF tokenizer model {kind!r} is not supported (supported: gpt2, llama)", field="tokenizer"
        )
    _mark_added_tokens(rust, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    bos_id = _token_id(metadata, "bos", len(tokens))
    eos_id = _token_id(metadata, "eos", len(tokens))
    # Files without the flags follow llama.cpp: sentencepiece vocabularies and Llama 3's begin with the BOS token.
    wants_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre_kind(metadata) == "llama-bpe")
    wants_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    begins = tokens[bos_id] if wants_bos and bos_id is not None else None
    ends = tokens[eos_id] if wants_eos and eos_id is not None else None
    _set_template(rust, begins, ends)
    return Tokenizer(
        rust,
        eos_token_ids=find_eos_token_ids(source, gguf),
        bos_token_id=bos_id,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _token_id(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return int(token_id) if token_id is not None and 0 <= token_id < vocab_size else None


def _pre_kind(metadata: dict[str, Any]) -> str:
    return metadata.get("tokenizer.ggml.pre") or "default"


def _byte_level_bpe(gguf: GGUFFile, tokens: list[str]) -> RustTokenizer:
    kind = _pre_kind(gguf.metadata)
    splitters = _PRE_TOKENIZERS.get(kind)
    if splitters is None:
        raise ModelLoadError(
            f"the GGUF pre-tokenizer kind {kind!r} is not supported (supported: {', '.join(sorted(_PRE_TOKENIZERS))})",
            field="tokenizer",
        )
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise ModelLoadError(f"{gguf.path} lists no merges for its gpt2 tokenizer", field="tokenizer")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a word that is itself a token whole, whatever its merges say.
    rust = _build_bpe(tokens, pairs, ignore_merges=kind in ("llama-bpe", "llama3"))
    if kind == "qwen2":
        rust.normalizer = normalizers.NFC()
    rust.pre_tokenizer = pre_tokenizers.Sequence(splitters())
    rust.decoder = decoders.ByteLevel()
    return rust


def _gpt2_splitters() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm_splitters() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_splitters()]


def _llama3_splitters() -> list[Any]:
    return _word_splitters(r"\p{N}{1,3}")


def _qwen2_splitters() -> list[Any]:
    return _word_splitters(r"\p{N}")


def _word_splitters(digits: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# By `tokenizer.ggml.pre`; the names are llama.cpp's. A file without one is GPT-2's.
_PRE_TOKENIZERS = {
    "default": _gpt2_splitters,
    "gpt-2": _gpt2_splitters,
    "smollm": _smollm_splitters,
    "llama-bpe": _llama3_splitters,
    "llama3": _llama3_splitters,
    "qwen2": _qwen2_splitters,
}


def _sentencepiece_bpe(gguf: GGUFFile, tokens: list[str]) -> RustTokenizer:
    """Llama's sentencepiece BPE: spaces become U+2581, unknown characters fall back to byte tokens."""
    metadata = gguf.metadata
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError(f"{gguf.path} lists no scores for its llama tokenizer", field="tokenizer")
    unknown = _token_id(metadata, "unknown", len(tokens))
    rust = _build_bpe(
        tokens,
        _merges_from_scores(tokens, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SENTENCEPIECE_SPACE)] if prefix else []
    rust.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SENTENCEPIECE_SPACE)])
    decoding = [decoders.Replace(_SENTENCEPIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return rust


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules equal to sentencepiece's: of all adjacent pairs, the one whose union has the best score merges."""
    rank = {token: index for index, token in enumerate(tokens)}
    found = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in rank and right in rank:
                found.append((-score, rank[left], rank[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _build_bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> RustTokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError("the GGUF vocabulary lists a token twice", field="tokenizer")
    try:
        return RustTokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exceptions, for a merge of unknown tokens for example
        raise ModelLoadError(f"the GGUF vocabulary and merges do not fit: {error}", field="tokenizer") from error


def _mark_added_tokens(rust: RustTokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens become special, user-defined ones are matched whole but stay visible in decoded text."""
    added = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED):
            added.append(AddedToken(token, special=kind == _GGUF_CONTROL, normalized=False))
    rust.add_tokens(added)


def _set_template(rust: RustTokenizer, begins: str | None, ends: str | None) -> None:
    """Wrap encoded text in the BOS and EOS tokens given."""
    used = [token for token in (begins, ends) if token is not None]
    ids = {token: rust.token_to_id(token) for token in used}
    if None in ids.values():
        raise ModelLoadError(f"the special tokens {used} are not all in the vocabulary", field="tokenizer")
    single = " ".join(part for part in (begins, "$A", ends) if part)
    rust.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
