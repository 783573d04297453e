"""Commands of the README and the guides run as printed: Python, curl and `tidemill` commands."""

import asyncio
import contextlib
import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import FAST, open_folder
from fake_engine import Served, demo_engine, serve

from tidemill import cli

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install ."
PAGES = [README, *sorted((ROOT / "docs" / "guides").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"
CURL = re.compile(
    r"^(?:\$ )?curl -s \S+(/v1/\S+) -H 'content-type: application/json' -d '\n(.*?)'\n(.*?)```",
    re.MULTILINE | re.DOTALL,
)
"""Path, body, and the answer's message below it, if any."""


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Served]:
    """The demo model, as `tidemill serve` serves it, with files and batches."""
    engine, tokenizer = demo_engine(max_num_seqs=16)
    folder = await open_folder(tmp_path / "state")
    options: dict[str, Any] = {"served_model_name": ("tidemill-demo",), "folder": folder, "batch_limits": FAST}
    async with serve(engine, tokenizer, **options) as served:
        yield served


async def test_the_python_of_the_readme(demo: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks)
    assert ADDRESS in program
    shown = io.StringIO()

    def run() -> None:
        scope: dict[str, Any] = {}
        exec(compile(program.replace(ADDRESS, demo.url), str(README), "exec"), scope)
        scope["client"].close()

    with contextlib.redirect_stdout(shown):
        await asyncio.to_thread(run)
    lines = shown.getvalue().splitlines()
    for promised in re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE):
        assert any(line.startswith(promised.removesuffix("...")) for line in lines), (promised, lines)
    for country, city in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo")):
        assert f"{country} The capital of {country} is {city}." in lines


def write_reviews(num_rows: int) -> None:
    schema = {"type": "object", "properties": {"label": {"enum": ["good", "bad"]}}, "required": ["label"]}
    Path("label.json").write_text(json.dumps(schema))
    Path("reviews.csv").write_text("id,text\n" + "".join(f'{n},"Broken, after {n} days"\n' for n in range(num_rows)))


def read_labels() -> list[dict[str, str]]:
    with Path("labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.cpu_limit(6)  # two processes of the command line
async def test_the_batch_of_the_readme_runs_as_printed(
    demo: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its twenty rows, then only the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_URL", demo.url)
    write_reviews(25)
    printed = re.findall(r"^tidemill (batch run .*)$", README.read_text(), re.MULTILINE)
    for line, num_rows in zip(printed, (20, 25), strict=True):
        ran = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *shlex.split(line))
        assert await ran.wait() == 0
        labels = read_labels()
        assert [row["id"] for row in labels] == [str(number) for number in range(num_rows)]
        assert {row["label"] for row in labels} <= {"good", "bad"} and {row["status"] for row in labels} == {"ok"}
    async with httpx.AsyncClient() as client:
        batches = (await client.get(f"{demo.url}/v1/batches")).json()["data"]
    assert sorted(batch["request_counts"]["completed"] for batch in batches) == [5, 20]


async def test_every_curl_and_the_answer_that_it_shows(demo: Served) -> None:
    found = {page.name: CURL.findall(page.read_text()) for page in PAGES}
    assert found["README.md"] and len(found["tools.md"]) == 2 and found["structured.md"]
    async with httpx.AsyncClient(timeout=60) as client:
        for name, commands in found.items():
            for path, body, shown in commands:
                answer = await client.post(demo.url + path, json=json.loads(body))
                assert answer.status_code == 200, (name, answer.text)
                message = {key: value for key, value in answer.json()["choices"][0]["message"].items() if value}
                for call in message.get("tool_calls", ()):
                    call.pop("id")
                if shown.strip():
                    assert message == json.loads(shown), name


def test_every_command_of_the_readme_exists(tmp_path: Path) -> None:
    """Clone as printed; let make plan each of its commands; other lines belong to tools that other tests run."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in found if not language and "curl" not in block]
    lines = [re.split(r"\s+#", line)[0] for block in blocks for line in block.splitlines()]
    assert {INSTALL, "make serve", "make test"} <= set(lines)
    for line in lines:
        if line.startswith("git clone "):
            command = line.replace("ADDRESS", f"file://{ROOT} --quiet --depth 1") + " && test -f Makefile"
            subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        elif line.startswith("make "):
            subprocess.run(f"{line} --dry-run", shell=True, cwd=ROOT, check=True, capture_output=True)
        else:
            assert line == INSTALL or line.startswith(("tidemill ", "sudo apt install ")), line


@pytest.mark.manual
@pytest.mark.timeout(1800)
def test_the_first_block_works_where_the_system_manages_pip(tmp_path: Path) -> None:
    """As on Debian 12 (PEP 668): no virtual environment, and a `pip` that refuses. Needs a package registry."""
    (block,) = re.findall(r"^```\n(.*?git clone.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[:1]
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    refuses = "echo error: externally-managed-environment >&2; exit 1"
    for name, text in (("sudo", "exit 0"), ("pip", refuses), ("pip3", refuses)):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    program = block.replace("ADDRESS", f"file://{ROOT} --quiet --depth 1")
    program = re.sub(r"make serve .*\nmake test .*", "make serve ARGS=--dry-run", program)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HTTP", "http", "no_proxy"))}
    environment = kept | {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path)}
    command = ["sh", "-e", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_tidemill_command_is_one(page: Path) -> None:
    """Those of bench, simulate and worth have parsers of their own."""
    text = page.read_text()
    inline = re.findall(r"`tidemill ([^`]+)`", text.replace("\n", " "))
    fenced = [m[1] for m in re.finditer(r"^(?:\$ |.*&& )?tidemill (.*)$", text, re.MULTILINE)]
    parser = cli._parser()
    for command in [*inline, *fenced]:
        if not command.startswith(("bench", "simulate", "worth")) and "..." not in command and " " in command:
            words = shlex.split(re.split(r"\s+#| \||&& ", command)[0])
            assert parser.parse_args(words).run, command
