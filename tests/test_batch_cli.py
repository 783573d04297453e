"""`tidemill batch` against a real server: its output, files and exit codes."""

import asyncio
import io
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from batch_tools import FAST, BatchLimits, batch_server, eventually, jsonl, line
from fake_engine import MODEL, Served
from fixtures import StartServer
from support.tables import for_each

from engine.text.tokenizer import Tokenizer
from gateway.store.objects import Page
from tidemill import cli
from tidemill import client as client_module
from tidemill.client import ChatOptions, ServerClient
from tidemill.progress import BatchProgress, duration_text, progress_text, range_text, shortened


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEMILL_URL", "TIDEMILL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client_module, "POLL_SECONDS", -1.0)  # a sleep between polls would raise: the server streams


@pytest.fixture
async def served(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Served]:
    async with batch_server(tokenizer, tmp_path / "state", "done", api_key=("key",)) as (served, _):
        yield served


class Terminal:
    """Runs commands as a user would, in a thread beside the server."""

    def __init__(self, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
        self._served, self._capsys = served, capsys

    async def run(self, name: str, *arguments: str, key: str = "key") -> tuple[int, str, str]:
        argv = ["batch", name, "--url", self._served.url, "--api-key", key, *arguments]
        code = await asyncio.to_thread(cli.main, argv)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def terminal(served: Served, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(served, capsys)


def input_file(tmp_path: Path, lines: list[Any]) -> str:
    path = tmp_path / 'in "put".jsonl'
    path.write_bytes(jsonl(lines))
    return str(path)


async def test_from_submit_to_results(terminal: Terminal, tmp_path: Path) -> None:
    path = input_file(tmp_path, [line(1), line(2), line(3, temperature=9)])
    code, out, err = await terminal.run("submit", path, "--watch", "--metadata", "a=b=c", "--window", "2h")
    assert code == 1, "a line failed"
    batch_id = out.strip()
    assert batch_id.startswith("batch_") and "completed: 3/3 lines, 1 failed" in err.splitlines()[-3]
    assert f"tidemill batch results {batch_id} --output FILE" in err.splitlines()[-2]
    assert err.splitlines()[-1].startswith("tidemill: 1 line: ") and err.endswith(")\n")
    code, out, err = await terminal.run("results", batch_id)
    assert code == 0 and {json.loads(row)["custom_id"] for row in out.splitlines()} == {"id-1", "id-2"}
    assert err == "tidemill: lines without an answer: 1; --errors FILE writes their rows\n"
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    code, out, err = await terminal.run("results", batch_id, "--output", str(good), "--errors", str(bad))
    assert (code, out, err) == (0, "", "") and len(good.read_text().splitlines()) == 2
    assert [json.loads(row)["custom_id"] for row in bad.read_text().splitlines()] == ["id-3"]
    for flags, words in (
        (["--output", str(good)], "the file exists; --force replaces it"),
        (["--output", str(good), "--errors", f"{tmp_path}/../{tmp_path.name}/good.jsonl"], "name one file"),
    ):
        code, _, err = await terminal.run("results", batch_id, *flags)
        assert code == 2 and words in err
    assert (await terminal.run("results", batch_id, "--output", str(good), "--force"))[0] == 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    code, out, _ = await terminal.run("list")
    header, row = (each.rstrip() for each in out.splitlines())
    assert code == 0 and header.split() == ["batch", "created", "status", "file", "lines"]
    assert row.split()[0] == batch_id and row.endswith("completed    in _put_.jsonl  3/3 lines, 1 failed")
    assert (await terminal.run("watch", batch_id))[0] == 1, "a line failed"
    assert (await terminal.run("cancel", batch_id[:14]))[1] == "completed\n", "a unique prefix names a batch"


async def test_what_is_submitted(terminal: Terminal, served: Served, tmp_path: Path) -> None:
    path = input_file(tmp_path, [line(1, "/v1/chat/completions")])
    assert await terminal.run("list") == (0, "", "no batches yet\n")
    _, out, _ = await terminal.run("submit", path, "--metadata", "team=a", "--window", "90m")
    tenant = (await served.app.state.batches.folder.store.load_batch(out.strip())).tenant
    batch = await served.app.state.batches.folder.store.get_batch(tenant, out.strip())
    assert (batch.endpoint, batch.completion_window, batch.metadata) == ("/v1/chat/completions", "90m", {"team": "a"})
    file = await served.app.state.batches.folder.store.get_file(tenant, batch.input_file_id, 0)
    assert file.filename == "in _put_.jsonl"


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        ([], ["gpt-4o-mini", MODEL]),
        (["--model", "alias"], ["alias", "alias"]),
        (["--map-model", "gpt-4o-mini=alias", "--map-model", "x=y"], ["alias", MODEL]),
    ],
)
async def test_the_models_of_ready_made_lines(
    terminal: Terminal, served: Served, tmp_path: Path, flags: list[str], models: list[str]
) -> None:
    """`submit` and `run` send the same models; lines that are no requests are left to the server.

    `run` sends a batch for each model, because a batch has one.
    """
    lines = [line(1, model="gpt-4o-mini"), line(2)]
    await terminal.run("run", input_file(tmp_path, lines), "-o", str(tmp_path / "out.jsonl"), *flags)
    await terminal.run("submit", input_file(tmp_path, [*lines, "no request"]), *flags)
    folder = served.app.state.batches.folder
    batches, _ = await folder.store.list_batches(None, Page(9))
    sent = [folder.file_path(batch.input_file_id).read_bytes().splitlines() for batch in batches]
    submitted, *ran = [[json.loads(row)["body"]["model"] for row in rows if row.startswith(b"{")] for rows in sent]
    assert submitted == models and sorted(model for batch in ran for model in batch) == sorted(models)
    assert len(ran) == len(set(models)) and sent[0][2:] == [b'"no request"']


async def test_a_list_longer_than_a_page(terminal: Terminal, tmp_path: Path) -> None:
    path = input_file(tmp_path, [line(1)])
    ids = [(await terminal.run("submit", path))[1].strip() for _ in range(4)]
    _, out, _ = await terminal.run("list", "--limit", "3")
    assert [row.split()[0] for row in out.splitlines()[1:]] == ids[:0:-1]
    code, _, err = await terminal.run("watch", "batch_")
    assert code == 1 and err == "tidemill: 4 batches begin with batch_; tidemill batch list shows them\n"


async def test_a_batch_that_fails_says_why(terminal: Terminal, tmp_path: Path) -> None:
    path = input_file(tmp_path, [line(1), line(1)])
    code, out, err = await terminal.run("submit", path, "--watch")
    assert code == 1 and "line 2: Another line has the same 'custom_id'. (duplicate_custom_id)" in err
    assert (await terminal.run("results", out.strip()))[0] == 1


async def test_a_batch_that_runs(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with batch_server(tokenizer, tmp_path / "state", "x", hold_after=0, limits=FAST) as (served, _):
        terminal = Terminal(served, capsys)
        _, out, _ = await terminal.run("submit", input_file(tmp_path, [line(1)]))
        await served.engine.wait_for_event("add")
        code, text, err = await terminal.run("results", out.strip())
        assert (code, text) == (
            1,
            "",
        ) and err == "tidemill: the batch is in_progress (0/1 lines); results are available after it ends\n"
        watched: list[str] = []
        changes = ServerClient(ChatOptions(served.url)).changes(out.strip())
        watching = asyncio.create_task(
            asyncio.to_thread(lambda: watched.extend(str(batch["status"]) for batch in changes))
        )
        await eventually(lambda: "in_progress" in watched)
        assert (await terminal.run("cancel", out.strip()))[1] in ("cancelling\n", "cancelled\n")
        await watching
        assert watched[-1] == "cancelled" and (await terminal.run("watch", out.strip()))[0] == 1


@for_each(
    ("arguments", "code", "says"),
    [
        (("watch", "batch_none"), 1, "there is no batch batch_none; tidemill batch list shows them"),
        (("watch", "batch_" + "0" * 32), 1, "The batch does not exist."),
        (("cancel", "../../x"), 1, "there is no batch ../../x"),
        (("submit", "missing.jsonl"), 2, "missing.jsonl: No such file or directory"),
        (("submit", "."), 2, ".: Is a directory"),
        (("submit", "IN", "--metadata", "nothing"), 2, "--metadata must look like KEY=VALUE"),
        (("submit", "IN", "--endpoint", "/v1/images"), 1, "'endpoint' must be one of"),
        (("submit", "IN", "--window", "1y"), 1, "'completion_window' must be a duration"),
        (("submit", "OTHER"), 2, 'the first line is not a batch request; a line looks like {"custom_id": "1"'),
        (("submit", "EMPTY"), 2, "the file is empty"),
        (("submit", "TABLE"), 2, "the file looks like CSV"),
        (("submit", "BINARY"), 2, "the file is binary"),
    ],
)
async def test_what_is_refused_is_one_line(
    terminal: Terminal, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    files = {"OTHER": b"hello\n", "EMPTY": b"", "TABLE": b"id,text\n1,hello\n", "BINARY": b"\x00\x01"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    places = {"IN": input_file(tmp_path, [line(1)])} | {name: str(tmp_path / name) for name in files}
    found, out, err = await terminal.run(*(places.get(word, word) for word in arguments))
    assert (found, out) == (code, "") and says in err and err.startswith("tidemill: ") and err.count("\n") == 1


async def test_an_upload_that_is_refused_early_says_why(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = BatchLimits(file_bytes=1000)
    async with batch_server(tokenizer, tmp_path / "state", limits=limits, api_key=("key",)) as (served, _):
        big = input_file(tmp_path, [line(1, user="x" * 3_000_000)])
        code, _, err = await Terminal(served, capsys).run("submit", big)
        assert code == 1 and "larger than" in err
        code, _, err = await Terminal(served, capsys).run("submit", big, key="wrong")
        assert code == 1 and "The API key is not valid. (--api-key or TIDEMILL_API_KEY)" in err
        code, _, err = await Terminal(served, capsys).run("list", key="")
        assert code == 1 and "An API key is required; send it as a bearer token. (--api-key" in err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["batch", "list", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot reach http://127.0.0.1:1: Connection refused" in capsys.readouterr().err


async def test_a_server_without_batches(start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = await Terminal(await start_server("x"), capsys).run("list")
    assert code == 1 and "The resource does not exist." in err


# ---- the bar


def a_batch(completed: int, failed: int = 0, total: int = 1000, tokens: int = 0, status: str = "in_progress") -> Any:
    counts = {"total": total, "completed": completed, "failed": failed}
    return {"status": status, "request_counts": counts, "usage": {"output_tokens": tokens}}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    now = [0.0]
    screen = Screen()
    progress = BatchProgress(screen, lambda: now[0], width=10)
    progress.show(a_batch(0))
    now[0] = 10.0
    progress.show(a_batch(490, 10, tokens=20_000))
    progress.end()
    first, second = screen.getvalue().removesuffix("\n").split("\r\x1b[K")[1:]
    assert first == "in_progress [----------] 0/1,000 lines"
    assert second == "in_progress [#####-----] 500/1,000 lines, 10 failed  50.0 lines/s, 2,000 output tokens/s"
    monkeypatch.setattr(client_module.time, "time", lambda: 1_000_000.0)
    notes = {"tidemill.eta": "1000600-1000840", "tidemill.at_risk": "false"}
    estimated = a_batch(490, 10) | {"metadata": notes}
    assert re.search(r"  done in about 10 to 14 min \(\d\d:\d\d\)$", progress.text(estimated)), (
        "the server's own estimate"
    )
    late = estimated | {"metadata": notes | {"tidemill.at_risk": "true"}}
    assert progress.text(late).endswith("), may miss its window")
    now[0] = 20.0
    assert "done in" not in progress.text(a_batch(1000, tokens=20_001, status="completed"))


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    now = [0.0]
    progress = BatchProgress(io.StringIO(), lambda: now[0])
    for second in range(0, 100, 10):
        now[0] = float(second)
        text = progress.text(a_batch(min(second, 50), tokens=100 * min(second, 50)))
    assert "tokens/s" not in text, "nothing has moved for half a minute"


def test_without_a_terminal_there_is_a_line_for_each_percent_or_half_minute() -> None:
    out, now = io.StringIO(), [0.0]
    progress = BatchProgress(out, lambda: now[0])
    estimated = a_batch(20) | {"metadata": {"tidemill.eta": f"{int(time.time()) + 65}-{int(time.time()) + 115}"}}
    for batch in (a_batch(0, total=0, status="validating"), a_batch(1), a_batch(2), a_batch(9), a_batch(10), estimated):
        now[0] += 1.0
        progress.show(batch)
    now[0] += 30.0
    progress.show(a_batch(21))
    progress.end()
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["validating: no lines yet", "in_progress: 1/1,000 lines", "in_progress: 10/1,000 lines"]
    assert lines[3].startswith("in_progress: 20/1,000 lines  done in about 1 to 2 min ") and lines[4:] == [
        "in_progress: 21/1,000 lines"
    ]


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [
        (-5.0, 30.0, "less than 1 min"),
        (610.0, 830.0, "about 10 to 14 min"),
        (600.0, 660.0, "about 10 to 11 min"),
        (6_000.0, 6_100.0, "about 1 to 2 h"),
        (500_000.0, 600_000.0, "about 5 to 7 d"),
        (1e9, 2e9, "about 11574 to 23149 d"),
    ],
)
def test_ranges(least: float, most: float, text: str) -> None:
    assert range_text(least, most) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01"), (-5, "0:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert progress_text({"request_counts": None}) == "no lines yet"


@pytest.mark.parametrize(
    ("text", "cells", "expected"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefgh", 6, "abcd.."),
        ("漢字漢字", 6, "漢字.."),
        ("a\x1b[2J\u202e\nb", 9, "a?[2J??b"),
    ],
)
def test_a_file_name_is_one_line_of_text(text: str, cells: int, expected: str) -> None:
    assert shortened(text, cells) == expected
