"""`make gpu-check` in tiny sizes on the CPU: every section runs, so that it will run where there is a GPU."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as check
from benchmarks.gpu.kernels import check_kernels
from benchmarks.gpu.setup import Setup, tiny_setup
from benchmarks.gpu.table import Row, failure, render, row_from_json

ROOT = Path(__file__).parents[2]
SERVER = {"fastapi", "starlette", "uvicorn", "orjson", "pydantic", "gateway", "aiohttp", "msgspec", "prometheus_client"}


def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)


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
    parts = re.split(r"^end of \w+\n", ended.stdout, flags=re.MULTILINE)
    return [check._rows(part) for part in parts[:-1]]


@pytest.mark.slow
def test_sections() -> None:
    counts = {"limits": 3, "attention": 3, "steps": 9, "float8": 2, "swap": 3, "serving": 4, "drop": 3}
    found = rows_without_a_server(*counts)
    assert [len(rows) for rows in found] == list(counts.values())
    assert all(row.measured is not None and math.isfinite(row.measured) for rows in found for row in rows)


@pytest.mark.slow
def test_features_are_the_engine_that_the_server_builds(capsys: pytest.CaptureFixture[str]) -> None:
    """The one section that needs the server's packages."""
    check.run_here(tiny_setup(), ["features"])
    (row,) = check._rows(capsys.readouterr().out)
    assert row.measured is not None and math.isfinite(row.measured)


@pytest.mark.manual
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "count"), [("equality", 2)])
def test_long_sections(name: str, count: int) -> None:
    (rows,) = rows_without_a_server(name)
    assert len(rows) == count
    assert all(row.measured is not None and math.isfinite(row.measured) for row in rows)
    assert all(row.met for row in rows)


def test_kernel_errors_are_small_and_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.met for row in check_kernels(tiny_setup()))
    kernels = tiny_setup().kernels()

    class Wrong:
        def __getattr__(self, name: str) -> object:
            original = getattr(kernels, name)
            if name != "silu_and_mul":
                return original
            return lambda x: original(x) * 1.01

    monkeypatch.setattr(Setup, "kernels", lambda self: Wrong())
    assert [row.metric for row in check_kernels(tiny_setup()) if not row.met] == ["SwiGLU: error"]


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
    with pytest.raises(ValueError, match="not a row"):
        row_from_json("[1]")


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    ended = run("limits", "--tiny", "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    assert "copy bandwidth" in ended.stdout
    written = json.loads(target.read_text())
    assert len(written["rows"]) == 3 and written["torch"] == torch.__version__


@pytest.mark.slow
def test_it_needs_nothing_of_the_server() -> None:
    modules = sorted(f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks" / "gpu").glob("*.py"))
    code = f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ended.stdout.split()}
    assert not loaded & SERVER
    ours = {name for name in ended.stdout.split() if name.split(".")[0] in ("loadgen", "benchmarks")}
    plans = {"benchmarks.simulated_fleet", "benchmarks.simulated_fleet.plans"}
    assert ours == {"benchmarks", "benchmarks.gpu", *modules} | plans, "and nothing of the load generator"


def test_the_summary_is_one_line_to_paste() -> None:
    rows = [
        Row("decode attention, heads 32/8 of 128: error", "", 1e-3, 3e-2, lower=True),
        Row("SwiGLU: error", "", 1.0, 3e-2, lower=True),
        Row("offline 1000/1000, 8B", "k tok/s", 9.12),
        failure("swap", "did not end"),
    ]
    line = check.summary({"device": "a card", "driver": "580.1"}, rows)
    assert line == (
        "gpu-check: device a card, driver 580.1; 1 of 2 kernels pass; FAIL: SwiGLU; no result: swap; "
        "offline 1000/1000, 8B 9.12 k tok/s"
    )
    assert {"device", "driver", "torch", "triton", "tidemill"} <= check.describe(tiny_setup()).keys()
