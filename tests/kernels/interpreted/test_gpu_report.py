"""The GPU report runs from the gate to the engine: at toy sizes, interpreted. Its times mean nothing here."""

import json
import runpy

import pytest

from benchmarks import gpu_report, tune_kernels
from benchmarks.gpu import correctness
from benchmarks.gpu.bench import Table
from benchmarks.gpu.report import Report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.json"
    assert gpu_report.main(["--toy", "--json", str(path)]) == 0
    return path


def test_every_table_has_rows(report):
    data = json.loads(report.read_text())
    assert set(data["tables"]) == {"correctness", "ceilings", *(table.name for table in gpu_report.TABLES)}
    assert all(data["tables"].values())
    assert all(row["agrees"] for row in data["tables"]["correctness"].values())
    # With and without CUDA graphs.
    assert len(data["tables"]["engine"]) == 2
    assert all(row["tokens/s"] > 0 and row["% of floor"] > 0 for row in data["tables"]["engine"].values())
    text = report.with_suffix(".md").read_text()
    assert all(f"## {table.title}\n\n|" in text for table in gpu_report.TABLES)


def test_a_report_is_continued(report, capsys):
    data = json.loads(report.read_text())
    removed = data["tables"]["splits"].popitem()[0]
    report.write_text(json.dumps(data))
    capsys.readouterr()
    assert gpu_report.main(["--toy", "--json", str(report)]) == 0
    measured = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [line.strip().split(": {")[0] for line in measured] == [f"splits: {removed}"]


def test_another_machines_report_is_refused(report, tmp_path):
    data = json.loads(report.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "machine": {"device": "another"}}))
    with pytest.raises(SystemExit, match="another machine"):
        gpu_report.main(["--toy", "--json", str(other)])


def test_time_that_is_up_is_said(report, tmp_path):
    path = tmp_path / "late.json"
    assert gpu_report.main(["--toy", "--json", str(path), "--seconds", "-1"]) == 0
    assert "not measured in time" in path.with_suffix(".md").read_text()


def test_a_row_that_fails_stops_no_other(tmp_path):
    def rows(bench):
        yield "bad", lambda: 1 / 0
        yield "good", lambda: {"us": 1.0}

    report = Report(tmp_path / "report.json", {}, deadline=float("inf"))
    table = Table("table", "Title", rows)
    assert report.run(table, None) == {"good": {"us": 1.0}}
    assert "ZeroDivisionError" in report.failed["table: bad"]
    assert "ZeroDivisionError" in report.markdown([table])


def test_nothing_is_measured_after_a_wrong_result():
    with pytest.raises(SystemExit, match="wrong on this machine"):
        correctness.require_agreement({"good": {"agrees": True}, "bad": {"agrees": False, "difference": "7"}}, {})
    with pytest.raises(SystemExit, match="no such instruction"):
        correctness.require_agreement({"good": {"agrees": True}}, {"bad": "no such instruction"})
    assert not correctness.passed(lambda: (_ for _ in ()).throw(AssertionError("off")))["agrees"]


def test_the_table_of_launches_is_regenerated(tmp_path, capsys):
    """Toy shapes: a measured table replaces the one between the marks, and is a table again."""
    path = tmp_path / "launch_table.py"
    path.write_text(tune_kernels.TABLE_FILE.read_text())
    unchanged = {entry[16] for entry in tune_kernels.TABLE["decode"][90].values()}
    assert tune_kernels.main(["--toy", "--file", str(path)]) == 0
    namespace = runpy.run_path(str(path))
    assert namespace["TABLE"] == tune_kernels.TABLE
    assert {entry[16] for entry in namespace["TABLE"]["decode"][90].values()} == unchanged
    assert "->" in capsys.readouterr().out
    # Rendering is the file's own formatting: only entries differ.
    assert path.read_text().count("\n") == tune_kernels.TABLE_FILE.read_text().count("\n")
