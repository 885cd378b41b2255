"""Which model repository to serve. Knows directories, not what the models in them do. Called by the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import paged_backend
from paged_backend.server.errors import LaunchError

_NAME = "model_repository"
EXAMPLE_QUESTION = "What is the capital of France?"


def find_repository(given: str | None) -> Path:
    """The repository at `given`, else the one of the checkout this package or the working directory is in.

    Raises:
        LaunchError: there is none, or no model is in it.
    """
    if given is not None:
        path = Path(given).expanduser().resolve()
        if not path.is_dir():
            raise LaunchError(f"model repository {given} is not a directory: check --model-repository")
    else:
        path = _default_repository()
    if not any((model / "config.pbtxt").is_file() for model in path.iterdir()):
        raise LaunchError(f"model repository {path} holds no model (no */config.pbtxt in it)")
    return path


def example_client(repository: Path) -> Path | None:
    """The streaming example of the checkout `repository` belongs to, or None."""
    script = repository.parent / "client_examples" / "stream_text.py"
    return script if repository.name == _NAME and script.is_file() else None


def example_request(repository: Path, ready: list[str]) -> tuple[str, str] | None:
    """The first engine model among those that are `ready`, and a JSON body for its generate endpoint; None: none is."""
    for model in ready:
        for file in sorted((repository / model).glob("*/model.json")):
            ids_only = '"skip_tokenizer_init": true' in file.read_text(errors="replace")
            return model, json.dumps({"input_ids": [1, 2, 3]} if ids_only else {"text_input": EXAMPLE_QUESTION})
    return None


def _default_repository() -> Path:
    origin = paged_backend.__file__
    candidates = [Path(origin).resolve().parent.parent] if origin else []
    for folder in [*candidates, Path.cwd()]:
        if (folder / _NAME).is_dir():
            return folder / _NAME
    raise LaunchError(f"no {_NAME}/ found: run this in a checkout of the project or give --model-repository")
