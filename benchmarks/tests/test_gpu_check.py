"""`make gpu-check` in tiny sizes on the CPU: every section runs, so that it will run where there is a GPU."""

import importlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import result_tables
from benchmarks.gpu import __main__ as check
from benchmarks.gpu.kernels import check_kernels
from benchmarks.gpu.setup import Setup, tiny_setup
from benchmarks.gpu.table import Row, failure, render, row_from_json

ROOT = Path(__file__).parents[2]
SERVER = {"fastapi", "starlette", "uvicorn", "orjson", "pydantic", "gateway", "aiohttp", "msgspec", "prometheus_client"}


def run(*arguments: str, seconds: float = 170) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)


_BARE = """
import sys
from benchmarks.gpu import __main__ as check

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {server!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for section in {sections!r}:
    check.run_here(check.tiny_setup(), [section])
    print("end of", section)
"""


def rows_without_a_server(*sections: str) -> list[list[Row]]:
    """Of each section, in a process that can import nothing that only a server needs."""
    code = _BARE.format(server=SERVER, sections=sections)
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    parts = re.split(r"^end of [\w-]+\n", ended.stdout, flags=re.MULTILINE)
    return [list(check._rows(part.splitlines())) for part in parts[:-1]]


@pytest.mark.slow
def test_sections() -> None:
    counts = {
        "limits": 3, "attention": 4, "steps": 9, "int4": 7, "experts": 7, "gpt-oss": 7, "swap": 3, "serving": 4,
        "drop": 3,
    }  # fmt: skip
    found = rows_without_a_server(*counts)
    assert [len(rows) for rows in found] == list(counts.values())
    assert all(row.measured is not None and math.isfinite(row.measured) for rows in found for row in rows)


@pytest.mark.slow
def test_features_are_the_engine_that_the_server_builds(capsys: pytest.CaptureFixture[str]) -> None:
    """The one section that needs the server's packages."""
    check.run_here(tiny_setup(), ["features"])
    (row,) = check._rows(capsys.readouterr().out.splitlines())
    assert row.measured is not None and math.isfinite(row.measured)


@pytest.mark.manual
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "count"), [("equality", 2)])
def test_long_sections(name: str, count: int) -> None:
    (rows,) = rows_without_a_server(name)
    assert len(rows) == count
    assert all(row.measured is not None and math.isfinite(row.measured) for row in rows)
    assert all(row.met for row in rows)


def test_kernels_have_no_fault_and_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.met for row in check_kernels(tiny_setup()))
    kernels = tiny_setup().kernels()

    class Wrong:
        def __getattr__(self, name: str) -> object:
            original = getattr(kernels, name)
            if name != "silu_and_mul":
                return original
            return lambda x: original(x) * 1.01

    monkeypatch.setattr(Setup, "kernels", lambda self: Wrong())
    rows = list(check_kernels(tiny_setup()))
    assert not any(row.met for row in rows) and all("silu_and_mul differs from torch" in row.note for row in rows)


def test_the_table_says_what_was_met() -> None:
    rows = [
        Row("fast", "ms", 1.0, 2.0, lower=True),
        Row("slow", "ms", 3.0, 2.0, 1.5, "2.5 (them)", lower=True, note="why"),
        Row("wide", "GB/s", 3.0),
        failure("broken", "no such device"),
    ]
    assert [row.met for row in rows] == [True, False, None, False]
    assert [row_from_json(row.to_json()) for row in rows] == rows
    lines = render(rows).splitlines()
    assert lines[2].split() == ["slow", "1.5", "2.5", "(them)", "<=", "2", "3", "ms", "MISSED", "why"]
    assert "failed" in lines[4] and "no such device" in lines[4]


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    ended = run("limits", "--tiny", "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    assert "copy bandwidth" in ended.stdout
    written = json.loads(target.read_text())
    assert len(written["rows"]) == 3 and written["torch"] == torch.__version__


def test_the_ordered_plan_fits_the_time_of_a_lent_gpu() -> None:
    """Ten seconds are for the start, and every section is there."""
    for plan, seconds in zip(check.ORDERED.values(), (330, 420), strict=True):
        assert sum(plan.values()) + 10 <= seconds and min(plan.values()) > 2 * check.GRACE
        for module, function, _ in map(check.SECTIONS.__getitem__, "+".join(plan).split("+")):
            assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function))


@pytest.mark.parametrize("deaf", [False, True])
def test_a_section_that_hangs_keeps_its_rows_and_ends(monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    row, found = Row("fast", "ms", 1.0), list[Row]()

    class Patient(subprocess.Popen[str]):
        def wait(self, timeout: float | None = None) -> int:
            while not found:
                time.sleep(0.01)
            return super().wait(timeout)

    deaf_to = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if deaf else ""
    code = f"import signal, time\n{deaf_to}print({check._MARK + row.to_json()!r}, flush=True)\n"
    code += "time.sleep(60)"
    monkeypatch.setattr(check, "command_of", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(check, "GRACE", 0.3)
    monkeypatch.setattr(subprocess, "Popen", Patient)
    check.run_section("slow", 1.0, True, found.append)
    assert found == [row, failure("slow", "did not end within 1 s")]


def test_results_of_the_ordered_plan_are_a_table_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        Row("static budget", "offline tok/s", 3e4),
        Row("offline work alone", "offline tok/s", 4e4),
        Row("a", "", 1),
    ]
    for name in ("lent", "results"):
        (tmp_path / name).mkdir()
    found = check.result_of(rows, {"device": "a card", "date": "2026-11-29"})
    (tmp_path / "lent" / "gpu-2.json").write_text(json.dumps(found))
    monkeypatch.setattr(result_tables, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(result_tables, "PAGE", tmp_path / "page.md")
    result_tables.PAGE.write_text("<!-- results: gpu-1 -->\n\n<!-- results: gpu-2 -->\n")
    result_tables.main([str(tmp_path / "lent")])
    page = result_tables.PAGE.read_text()
    assert "| static budget | 30,000 offline tok/s | – | 40,000 |  |" in page
    assert "| a | 1 | – | – |  |" in page and page.count("Measured by") == 1
    assert re.search(r"Measured by `make gpu-check ARGS=--ordered`, [0-9a-f]{8}, 2026-11-29 on a card", page)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", check.ORDERED)
def test_the_ordered_plan_on_a_cpu(part: int, tmp_path: Path) -> None:
    run("--ordered", str(tmp_path), "--part", str(part), "--tiny", seconds=880)
    rows = [row_from_json(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row.measured is None], "no section failed or was cut"
    assert len(rows) > len(check.ORDERED[part])
    assert len(json.loads((tmp_path / f"gpu-{part}.json").read_text())["rows"]) == len(rows)
