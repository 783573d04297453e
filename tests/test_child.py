"""Processes of our own import nothing from the working directory, and find our packages wherever they lie."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from batch_tools import jsonl, line

from engine.machine import child as child

NAMES = [
    "pickle",
    "json",
    "orjson",
    "anyio",
    "asyncio",
    "signal",
    "array",
    "engine",
    "gateway",
    "predictor",
    "runpy",
    "numpy",
]
SCRIPT = """
import asyncio, json, sys
from engine.machine.child import ChildError, Turn, run_child
from gateway.batch.input import check_apart

async def main():
    report = await check_apart(sys.argv[1], "/v1/completions", 10, 1000)
    try:
        await run_child(int, "no number", turns=(Turn("usual", 900.0),))
    except ChildError as error:
        print(json.dumps([len(report.lines), str(error)]))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder in which every name is taken; an import from it leaves a note."""
    folder = tmp_path / "traps"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        note = f"open({str(tmp_path / 'caught')!r}, 'a').write({name!r})\n"
        for file in ("__init__.py", "search_child.py", "batch_input.py", "to_process.py"):
            (folder / name / file).write_text(note)
    return folder


def test_nothing_is_imported_from_the_working_directory(traps: Path, tmp_path: Path) -> None:
    script = tmp_path / "script" / "main.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (tmp_path / "input").write_bytes(jsonl([line(1), line(2)]))
    command = [sys.executable, str(script), str(tmp_path / "input")]
    done = subprocess.run(command, cwd=traps, capture_output=True, text=True, timeout=150, check=True)
    lines, error = json.loads(done.stdout)
    assert lines == 2 and error.startswith("ValueError")
    assert not (tmp_path / "caught").exists()


def test_our_packages_are_found_where_they_are(traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "only_here.py").write_text("import sys, pickle; print(__name__, sys.argv[1:], sys.path[0])")
    monkeypatch.setattr(child, "ROOT", tmp_path / "tree")
    done = subprocess.run(
        child.python_module("only_here", "a", "b"), cwd=traps, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"__main__ ['a', 'b'] {tmp_path / 'tree'}\n" and not (tmp_path / "caught").exists()


class Unlisted(set[threading.Thread]):
    """The threads of an executor before it lists the first one."""

    def add(self, _thread: threading.Thread) -> None:
        pass


def test_the_first_work_of_the_starter_may_start_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "starter", ThreadPoolExecutor(1, initializer=child._mark_starter))
    monkeypatch.setattr(child.starter, "_threads", Unlisted())
    process = child.starter.submit(child.start_process, [sys.executable, "-c", ""]).result(timeout=20)
    assert process.wait(timeout=20) == 0
