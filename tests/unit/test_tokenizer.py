"""Tokenizer: exact ids from GGUF vocabularies of every supported kind and from directories, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from paged_backend.errors import InvalidRequestError, ModelLoadError
from paged_backend.model_source import ModelSource
from paged_backend.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading and trailing  ",
    "tabs\tand\n\nnew\r\nlines  \n",
    "Café 123 😊 <|im_end|>",
    "日本語のテキスト, العربية, हिन्दी",
    "def f(x):\n    return x ** 2  # don't\n",
    "e\u0301 vs \u00e9",
    "",
]


@pytest.fixture(scope="module")
def demo(demo_model) -> Tokenizer:
    return Tokenizer.load(ModelSource(demo_model, is_gguf=True))


# ---- the demo model ------------------------------------------------------------------------------------------------


def test_demo_pieces_are_those_of_smollm2(demo):
    """Digits one by one, before the GPT-2 words: `token_to_id` of the pieces the published tokenizer gives."""
    pieces = ["C", "af", "Ã©", "Ġ", "1", "2", "3", "ĠðŁĺ", "Ĭ", "Ġ", "<|im_end|>"]
    assert demo.encode("Café 123 😊 <|im_end|>") == [demo._rust.token_to_id(piece) for piece in pieces]
    assert demo.encode("<|im_start|>user\n") == [1, demo._rust.token_to_id("user"), demo._rust.token_to_id("Ċ")]


def test_demo_attributes(demo):
    assert demo.vocab_size == 49152
    assert demo.eos_token_ids == (2,)
    assert demo.bos_token_id == 1
    assert "<|im_start|>" in demo.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_demo_round_trip(demo, text):
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_on_request(demo):
    ids = demo.encode("<|im_start|>hello , world !<|im_end|>")
    assert demo.decode(ids) == "hello , world !"  # and no clean-up of the spaces before punctuation
    assert demo.decode(ids, skip_special_tokens=False) == "<|im_start|>hello , world !<|im_end|>"


def test_no_bos_is_added_where_the_model_wants_none(demo):
    assert demo.encode("hello") == demo.encode("hello", add_special_tokens=False)


def test_threads_share_one_tokenizer(demo):
    expected = [demo.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: [demo.encode(text) for text in TEXTS], range(16)):
            assert got == expected


def test_loads_without_torch_or_transformers(demo_model):
    code = (
        "import sys; from pathlib import Path; from paged_backend.tokenizer import Tokenizer; "
        "from paged_backend.model_source import ModelSource; "
        f"t = Tokenizer.load(ModelSource(Path({str(demo_model)!r}), is_gguf=True)); assert t.encode('hi'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- other GGUF vocabularies ---------------------------------------------------------------------------------------


def _write_gguf(path, *, kind, tokens, kinds, pre=None, merges=None, scores=None, flags=None) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in (flags or {}).items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource(path, is_gguf=True)


def _byte_vocabulary(extra: list[str]) -> tuple[list[str], list[int]]:
    tokens = ["<|begin|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra, "<tool>"]
    kinds = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3), USER_DEFINED]
    return tokens, kinds


def _bpe_source(tmp_path, pre, **flags) -> ModelSource:
    extra = ["12", "123", "Ġ1", "Ġa", "ab", "abc"]
    merges = ["Ġ 1", "Ġ a", "1 2", "12 3", "a b"]
    tokens, kinds = _byte_vocabulary(extra)
    flags = {"bos_token_id": 0, "eos_token_id": 1, **flags}
    return _write_gguf(
        tmp_path / "bpe.gguf", kind="gpt2", tokens=tokens, kinds=kinds, pre=pre, merges=merges, flags=flags
    )


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 1234", ["a", "Ġ1", "2", "3", "4"]),
        (None, "a 1234", ["a", "Ġ1", "2", "3", "4"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("qwen2", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "a 1234", ["<|begin|>", "a", "Ġ", "123", "4"]),
        # Llama 3 takes a word that is a token, even though no merge makes it; the others do not.
        ("llama-bpe", "abc", ["<|begin|>", "abc"]),
        ("qwen2", "abc", ["ab", "c"]),
        # A user-defined token is matched whole.
        ("qwen2", "ab<tool>ab", ["ab", "<tool>", "ab"]),
    ],
)
def test_byte_level_kinds(tmp_path, pre, text, pieces):
    tokenizer = Tokenizer.load(_bpe_source(tmp_path, pre))
    ids = tokenizer.encode(text)
    assert [tokenizer._rust.id_to_token(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_qwen2_normalises_to_composed_characters(tmp_path):
    tokenizer = Tokenizer.load(_bpe_source(tmp_path, "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_end_of_turn_tokens_end_sequences_too(tmp_path):
    assert Tokenizer.load(_bpe_source(tmp_path, "gpt-2", eot_token_id=5)).eos_token_ids == (1, 5)


def test_bos_is_neither_doubled_nor_missing(tmp_path):
    tokenizer = Tokenizer.load(_bpe_source(tmp_path, "gpt-2", add_bos_token=True))
    assert tokenizer.encode("ab")[0] == 0
    assert tokenizer.encode("<|begin|>ab") == tokenizer.encode("ab")
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 0
    assert tokenizer.encode("") == [0]


def test_bos_and_eos_flags(tmp_path):
    tokenizer = Tokenizer.load(_bpe_source(tmp_path, "llama-bpe", add_bos_token=False, add_eos_token=True))
    assert tokenizer.encode("ab")[0] != 0
    assert tokenizer.encode("ab")[-1] == 1


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ModelLoadError, match=r"'mystery'.*smollm"):
        Tokenizer.load(_bpe_source(tmp_path, "mystery"))


def test_unknown_tokenizer_model_is_refused_by_name(tmp_path):
    source = _write_gguf(tmp_path / "t.gguf", kind="t5", tokens=["a"], kinds=[NORMAL])
    with pytest.raises(ModelLoadError, match="'t5'"):
        Tokenizer.load(source)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_damaged_gguf_is_refused(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        Tokenizer.load(ModelSource(path, is_gguf=True))


def _sentencepiece_source(tmp_path, **flags) -> ModelSource:
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "\u2581he", "\u2581hello", "hello", "lo"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    order = ["he", "ll", "lo", "hell", "\u2581he", "hello", "\u2581hello"]
    scores = [-float(order.index(t)) if t in order else -100.0 for t in tokens]
    flags = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **flags}
    return _write_gguf(tmp_path / "spm.gguf", kind="llama", tokens=tokens, kinds=kinds, scores=scores, flags=flags)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = Tokenizer.load(_sentencepiece_source(tmp_path))
    ids = tokenizer.encode("hello é")
    pieces = ["<s>", "\u2581hello", "\u2581", "<0xC3>", "<0xA9>"]
    assert [tokenizer._rust.id_to_token(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == "hello é"


def test_sentencepiece_without_space_prefix(tmp_path):
    tokenizer = Tokenizer.load(_sentencepiece_source(tmp_path, add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("hello hello")
    assert [tokenizer._rust.id_to_token(i) for i in ids] == ["hello", "\u2581hello"]
    assert tokenizer.decode(ids) == "hello hello"


# ---- directories ---------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer.json with an unfortunate truncation, and the files beside it."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    rust.enable_truncation(4)
    rust.save(str(tmp_path / "tokenizer.json"))
    _write_json(tmp_path / "config.json", {"eos_token_id": 5})
    _write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


def _write_json(path, value) -> None:
    path.write_text(json.dumps(value))


def _load(path) -> Tokenizer:
    return Tokenizer.load(ModelSource(path, is_gguf=False))


def test_directory(directory):
    tokenizer = _load(directory)
    assert tokenizer.encode("hello")[0] == 0
    assert len(tokenizer.encode("hello")) == 6  # truncation saved with the tokenizer is off
    assert tokenizer.decode(tokenizer.encode("hello , é")) == "hello , é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (0, (5,), None)


def test_generation_config_decides_on_the_end(directory):
    _write_json(directory / "generation_config.json", {"eos_token_id": [7, 1]})
    assert _load(directory).eos_token_ids == (1, 7)


def test_end_ids_must_be_integers(directory):
    _write_json(directory / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        _load(directory)


def test_eos_falls_back_to_the_tokenizer_config(directory):
    _write_json(directory / "config.json", {})
    assert _load(directory).eos_token_ids == (1,)


def test_tokenizer_config_overrides_the_template(directory):
    _write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True},
    )
    ids = _load(directory).encode("a")
    assert (ids[0] != 0, ids[-1]) == (True, 1)


def test_tokens_only_in_the_tokenizer_config(directory):
    """As transformers reads them, at the ids the file gives."""
    from transformers import PreTrainedTokenizerFast

    size = _load(directory).vocab_size
    config = {
        "bos_token": "<s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(size): {"content": "<|turn|>", "special": True, "normalized": False},
            str(size + 1): {"content": "<call>", "special": False, "normalized": False},
        },
    }
    _write_json(directory / "tokenizer_config.json", config)
    tokenizer = _load(directory)
    text = "a<|turn|>b<call>c"
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.decode(tokenizer.encode(text)) == "ab<call>c"
    assert tokenizer.encode(text) == PreTrainedTokenizerFast.from_pretrained(directory)(text)["input_ids"]


def test_chat_template_file_wins(directory):
    _write_json(directory / "tokenizer_config.json", {"chat_template": "from config"})
    assert _load(directory).chat_template == "from config"
    (directory / "chat_template.jinja").write_text("from file")
    assert _load(directory).chat_template == "from file"


def test_missing_tokenizer_is_refused(tmp_path):
    _write_json(tmp_path / "config.json", {})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        _load(tmp_path)


def test_unreadable_older_files_are_refused(tmp_path):
    _write_json(tmp_path / "config.json", {"model_type": "llama"})
    (tmp_path / "tokenizer.model").write_bytes(b"garbage")
    with pytest.raises(ModelLoadError, match="could not be converted"):
        _load(tmp_path)


def test_damaged_tokenizer_json_is_refused(directory):
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        _load(directory)


def test_ids_that_cannot_be_are_a_typed_error(demo):
    for wrong in (-1, 2**32):
        with pytest.raises(InvalidRequestError, match="no token id") as caught:
            demo.decode([5, wrong])
        assert caught.value.field == "token_ids"
    assert demo.decode([5, demo.vocab_size + 7]) == demo.decode([5])


def test_added_tokens_are_known_by_their_text(demo):
    assert demo.added_token(1) == "<|im_start|>"
    assert demo.added_token(1000) is None
