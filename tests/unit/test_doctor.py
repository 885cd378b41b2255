"""What doctor finds wrong, and that it says what to do. The machine's own checks run for real."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from paged_backend import cli
from paged_backend.doctor import machine, models
from paged_backend.doctor.report import Verdict, examine, ok, tell
from paged_backend.errors import ConfigError
from paged_backend.server.errors import LaunchError
from paged_backend.server.install import install_backend

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2


@pytest.fixture
def repository(tmp_path, tiny_llama):
    folder = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def write(repository: Path, **arguments) -> None:
    (repository / "paged_llm" / "1" / "model.json").write_text(json.dumps(arguments))


def failures(repository: Path, model: str | None = None) -> list[str]:
    found = examine([("repository", lambda: models.check_repository(str(repository), model))])
    return [finding.text for finding in found if finding.verdict is Verdict.FAILURE]


def test_a_good_repository(repository, tiny_llama):
    write(repository, model=str(tiny_llama), skip_tokenizer_init=True, stream_interval=2)
    assert failures(repository) == []


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"model": "/no/such/model"}, "does not exist"),
        ({"model": "m", "blok_size": 16}, "did you mean `block_size`"),
        ({"model": "m", "block_size": 17}, "`block_size` must be one of"),
        ({"model": "m", "stream_interval": 0}, "`stream_interval` must be"),
    ],
)
def test_bad_engine_arguments(repository, arguments, advice):
    write(repository, **arguments)
    (found,) = failures(repository)
    assert advice in found


def test_a_model_without_weights_and_one_without_tokenizer(repository, tiny_llama, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(tiny_llama / "config.json", empty)
    write(repository, model=str(empty), skip_tokenizer_init=True)
    assert "holds no *.safetensors weights" in failures(repository)[0]
    write(repository, model=str(tiny_llama))
    assert len(failures(repository)) == 1
    assert failures(repository, str(empty))


def cut(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])


@pytest.mark.parametrize(
    ("damage", "advice"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 4096), "cannot read"),
        (lambda folder: cut(folder / "model.safetensors", 0.9), "cannot read"),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}'),
            "architecture MambaForCausalLM is not supported",
        ),
    ],
    ids=["garbage", "cut short", "architecture"],
)
def test_model_files_that_cannot_load(repository, tiny_llama, tmp_path, damage, advice):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama, folder)
    damage(folder)
    write(repository, model=str(folder), skip_tokenizer_init=True)
    (found,) = failures(repository)
    assert advice in found


@pytest.mark.parametrize("share", [0.9, 0.01])
def test_a_gguf_file_cut_short(repository, demo_model, tmp_path, share):
    """In its tensors, and in its header."""
    file = tmp_path / "short.gguf"
    with demo_model.open("rb") as data, file.open("wb") as out:
        shutil.copyfileobj(data, out)
        out.truncate(int(share * demo_model.stat().st_size))
    write(repository, model=str(file), skip_tokenizer_init=True)
    (found,) = failures(repository)
    assert "cut short" in found or "not a readable GGUF file" in found


def test_our_backend_without_engine_arguments(repository, tiny_llama):
    write(repository, model=str(tiny_llama), skip_tokenizer_init=True)
    (repository / "llm" / "1").mkdir(parents=True)
    (repository / "llm" / "config.pbtxt").write_text('backend: "paged"\n')
    (found,) = failures(repository)
    assert 'says backend: "paged"' in found
    assert "no <version>/model.json" in found


def test_broken_repositories(repository, tmp_path):
    (repository / "paged_llm" / "1" / "model.json").write_text("{")
    assert "is not valid JSON" in failures(repository)[0]
    shutil.rmtree(repository / "paged_llm")
    found = failures(repository)
    assert len(found) == 2
    assert all("`engine_model`" in text for text in found)
    assert "is not a directory" in failures(tmp_path / "none")[0]


@pytest.mark.parametrize(
    ("free", "verdict"), [(8 * MIB, Verdict.FAILURE), (63 * MIB, Verdict.WARNING), (1024 * MIB, Verdict.OK)]
)
def test_shared_memory(monkeypatch, tmp_path, free, verdict):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(max(free, 64 * MIB), 0, free))
    (finding,) = machine.check_shared_memory(tmp_path)
    assert finding.verdict is verdict
    assert verdict is Verdict.OK or "--shm-size" in finding.text


def test_this_machine():
    found = examine([("shm", machine.check_shared_memory), ("GPU", machine.check_gpu)])
    assert {finding.subject for finding in found} >= {"shared memory", "torch", "GPU"}
    assert all(finding.verdict is not Verdict.FAILURE for finding in found), found


def test_the_readmes_doctor(capsys, demo_model):
    assert cli.main(["doctor", "--model-repository", str(ROOT / "model_repository")]) == 0
    assert "the tokenizer loads" in capsys.readouterr().out


def test_a_check_that_raises_fails_and_the_others_run():
    def refuse():
        raise ConfigError("change this")

    def crash():
        raise RuntimeError("oops")

    found = examine([("a", refuse), ("b", crash), ("c", lambda: [ok("c", "fine")])])
    said: list[str] = []
    assert tell(found, quiet=False, say=said.append) == 1
    assert said == [
        " FAILED  a: change this",
        " FAILED  b: the check itself failed: RuntimeError: oops",
        "     ok  c: fine",
    ]
    said.clear()
    assert tell(found[2:], quiet=True, say=said.append) == 0
    assert said == []


def test_live_without_a_server(capsys):
    assert cli.main(["doctor", "--live", "--url", "127.0.0.1:1", "--metrics-url", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert cli.main(["doctor", "--live", "--url", "nonsense", "--metrics-url", "127.0.0.1:1"]) == 1
    assert "--url 'nonsense' is no host:port" in capsys.readouterr().out


# --- install-backend ---


def test_install_backend_twice(tmp_path, capsys):
    assert cli.main(["install-backend", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"installed {tmp_path / 'paged'}\n"
    written = (tmp_path / "paged" / "model.py").read_text()
    assert install_backend(tmp_path) == tmp_path / "paged"
    assert (tmp_path / "paged" / "model.py").read_text() == written


def test_install_backend_leaves_what_is_not_its_own(tmp_path):
    with pytest.raises(LaunchError, match="give the server's backend directory"):
        install_backend(tmp_path / "none")
    (tmp_path / "paged").mkdir()
    (tmp_path / "paged" / "model.py").write_text("# somebody else's")
    with pytest.raises(LaunchError, match="is not this backend"):
        install_backend(tmp_path)
