"""The documentation against the code: engine arguments, aliases, alerts' advice, and that links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from paged_backend import cli
from paged_backend.config import EngineConfig
from paged_backend.doctor.arguments import descriptions, reference
from paged_backend.triton_adapter.aliases import ALIAS_INPUTS
from paged_backend.triton_adapter.settings import DRAIN_VARIABLE, MODEL_VARIABLE, ServingSettings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DEPLOYMENT = (DOCS / "deployment.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_page_of_engine_arguments_is_what_the_command_prints(capsys):
    assert cli.main(["engine-arguments"]) == 0
    printed = capsys.readouterr().out
    written = (DOCS / "engine_arguments.md").read_text()
    assert printed == written, "run: paged-backend engine-arguments > docs/engine_arguments.md"


@pytest.mark.parametrize("settings", [EngineConfig, ServingSettings])
def test_every_argument_is_described(settings):
    fields = {field.name for field in dataclasses.fields(settings)}
    assert set(descriptions(settings)) == fields
    assert all(f"| `{name}` |" in reference() for name in fields)


def test_the_environment_is_described():
    assert MODEL_VARIABLE in reference()
    assert DRAIN_VARIABLE in reference()


def test_the_alias_table_is_the_code():
    table = DEPLOYMENT.partition("| TensorRT-LLM's tensor |")[2].partition("| otherwise |")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))
    assert rows == {spec.name: spec.data_type.removeprefix("TYPE_") for spec in ALIAS_INPUTS}


def test_the_ensemble_passes_every_alias_on():
    config = (ROOT / "model_repository" / "paged_ensemble" / "config.pbtxt").read_text()
    for spec in ALIAS_INPUTS:
        assert (
            f'{{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {spec.dims[0]} ] optional: true }}' in config
        )
        assert f'input_map {{ key: "{spec.name}" value: "{spec.name}" }}' in config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_what_the_rules_advise_exists():
    rules = (DOCS / "monitoring" / "rules.yml").read_text()
    for page, heading in re.findall(r'(docs/\S+\.md), "([^"]+)"', rules):
        assert f"## {heading}" in (ROOT / page).read_text()
    for name in ("max_waiting_requests", "max_num_seqs", "swap_space"):
        assert name in rules
        assert name in descriptions(EngineConfig)
