"""`tidemill top`: a recorded stream at fixed widths, over HTTP against the fake engine, and on a terminal of its own.

top_stream.json is what `/dashboard/events` and `/v1/batches` of the demo model gave beside a batch of 400 lines.
"""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import batch_server, jsonl, keys_of, line, submit
from fake_engine import MODEL
from fixtures import StartServer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway import cli
from gateway.commands.chat import ChatError, ChatOptions, RefusedError
from gateway.commands.top import figures
from gateway.commands.top.follow import StatsFollower, TopClient, printed, run_top
from gateway.commands.top.history import History
from gateway.commands.top.view import Picture, limit_of, standing, time_left

RECORDED = json.loads((Path(__file__).parent / "top_stream.json").read_text())
SNAPSHOTS: list[dict[str, Any]] = RECORDED["snapshots"]
URL = "http://127.0.0.1:8000"


def picture(**changes: Any) -> Picture:
    shown = Picture(URL, model="tidemill-demo", version="0.1.0", batches=RECORDED["batches"])
    for snapshot in SNAPSHOTS:
        shown.history.add(snapshot)
    for name, value in changes.items():
        setattr(shown, name, value)
    return shown


def rows(text: str) -> dict[str, str]:
    """The lines by the word that they begin with."""
    return {each.split(" ")[0]: each for each in text.splitlines() if each and not each.startswith(" ")}


# ---- the picture


@pytest.mark.parametrize("width", [80, 120])
def test_a_recorded_stream(width: int) -> None:
    text = printed(picture(), width)
    assert max(map(cell_len, text.splitlines())) <= width
    lines = rows(text)
    assert lines["tidemill"] == f"tidemill 0.1.0  tidemill-demo  {URL}  ready"
    assert lines["promise"] == "promise  80 % of the last chats kept ttft_p99=1s,tbt_p99=100ms"
    assert (
        "         TTFT P99 169 ms of 1.00 s, kept by 100 %\n         TBT P99  248 ms of 100 ms, kept by 80 %\n" in text
    )
    assert lines["online"].endswith(" 159 tokens/s in + out") and lines["offline"].endswith(" 0 tokens/s in + out")
    assert "last 1 min, top " in text
    assert lines["TTFT"].endswith(" P50 38 ms P99 169 ms of 1.00 s")
    assert lines["TBT"].endswith(" P50 25 ms P99 248 ms of 100 ms")
    assert lines["steps"] == "steps    8.8 ms measured, 20 ms planned with a safety margin"
    assert lines["budget"] == "budget   80 ms, leftover used -, breaker closed"
    assert lines["requests"] == "requests online 0 running, 0 waiting; offline 0 running, 0 waiting"
    assert lines["cache"] == "cache    █░░░░░░░░░░░░░░░░░░░ in use 0 %, prefixes 3 %"
    assert lines["batch_090bb7f30a1f.."].split() == [
        "batch_090bb7f30a1f..", "completed", "█" * (width - 68), "400/400"
    ]  # fmt: skip


def test_a_terminal_without_unicode() -> None:
    text = printed(picture(model="modèle"), 80, "ascii")
    assert text.isascii() and "mod?le" in text and "########" in rows(text)["batch_090bb7f30a1f.."]


def test_the_middle_of_the_stream() -> None:
    """Both classes at work, a batch under way, the breaker half open."""
    shown = picture(history=History())
    for snapshot in SNAPSHOTS[:14]:
        shown.history.add(snapshot)
    now = SNAPSHOTS[13]
    shown.batches = [
        RECORDED["batches"][0]
        | {
            "status": "in_progress",
            "metadata": {"tidemill.eta": str(round(now["time"]) + 90)},
            "request_counts": {"total": 400, "completed": 97, "failed": 3},
        }
    ]
    lines = rows(printed(shown, 120))
    assert lines["batch_090bb7f30a1f.."].split()[-5:] == ["100/400", "3", "1", "min", "30", "s"][-5:]
    assert lines["requests"].endswith(
        f"offline {now['running']['offline']} running, {now['waiting']['offline']} waiting"
    )
    assert lines["budget"].endswith(f"breaker {now['breaker'].replace('_', ' ')}")


def test_each_of_several_engines_has_a_line() -> None:
    shown = picture()
    now = SNAPSHOTS[-1]

    def engine(number: int, tokens: int, **more: Any) -> dict[str, Any]:
        figures = {"running": 3, "waiting": 1, "computed_tokens": tokens, "offline_tokens": tokens // 4}
        units = {"total": 200, "owned": 50}
        return {"engine": number, "state": "ready", "trouble": None, "units": units, **figures, **more}

    for later in (1, 5):
        dead = engine(1, 0, state="dead", trouble="it ended\x1b[2J")
        shown.history.add(now | {"time": now["time"] + later, "engines": [engine(0, 400 * later), dead]})
    text = printed(shown, 120)
    assert "engines  0  3 running, 1 waiting, online 300 + offline 100 tokens/s in + out, cache 25 %\n" in text
    assert "         1  it ended?[2J" in text


def test_offline_answers_have_output_and_prompt_tokens_apart() -> None:
    shown = picture(batches=None)
    now = SNAPSHOTS[-1]
    assert "answers" not in printed(shown, 80)
    for later in (10, 30):
        batch = {"answers": 5 * later, "output_tokens": 320 * later, "prompt_tokens": 1280 * later}
        shown.history.add(now | {"time": now["time"] + later, "batch": batch})
    assert rows(printed(shown, 80))["answers"] == "answers  5/s offline: 320 output, 1,280 prompt tokens/s"


def test_text_from_the_server_is_only_text() -> None:
    evil = "[red]x[/red]\x1b[2J\x07\u202e"
    shown = picture(model=evil, trouble=evil, version=evil)
    shown.history.add(SNAPSHOTS[-1] | {"time": 2e9, "slo": evil, "breaker": evil, "reason": evil, "ready": False})
    shown.batches = [{"id": evil, "status": evil, "request_counts": None}]
    text = printed(shown, 120)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "[red]x[/red]?[2J??" in text
    shown.trouble = ""
    assert "[red]x[/red]?[2J??" in printed(shown, 200)


def test_before_the_first_figures_and_without_batches() -> None:
    assert printed(Picture(URL), 80) == f"tidemill  {URL}  no figures\n"
    assert "batch" not in printed(picture(batches=None), 80)
    assert printed(picture(batches=[]), 80).endswith("no batch yet\n")


def test_a_screen_shows_the_batches_that_fit() -> None:
    shown = picture(batches=[{"id": f"batch_{i}", "status": "validating"} for i in range(9)])
    console = Console(width=80, height=24, file=io.StringIO(), color_system=None)
    lines = console.render_lines(shown, console.options.update(width=80, height=24), pad=False)
    text = ["".join(part.text for part in each).strip() for each in lines]
    last = [each for each in text if each][-1]
    assert len(text) == 24 and last == "and 5 more"


# ---- figures


@given(st.integers(1, 200), st.sampled_from([30.0, 60.0, 600.0]))
def test_rates_add_up_to_what_the_counters_grew_by(cells: int, span: float) -> None:
    history = picture().history
    online, offline = history.rates(cells, span)
    first = next((i for i, rate in enumerate(offline) if rate is not None), cells)
    start = SNAPSHOTS[-1]["time"] - span + span * first / cells
    assert all(rate is not None for rate in offline[first:])
    tokens = sum(rate for rate in offline if rate is not None) * span / cells
    before = [s["offline_tokens"] for s in SNAPSHOTS if s["time"] <= start]
    after = [s["offline_tokens"] for s in SNAPSHOTS if s["time"] >= start]
    low, high = SNAPSHOTS[-1]["offline_tokens"] - after[0], SNAPSHOTS[-1]["offline_tokens"] - (before or [0])[-1]
    assert low - 1e-3 <= tokens <= high + 1e-3
    assert len(online) == cells and all((a is None) == (b is None) for a, b in zip(online, offline, strict=True))


def test_the_worst_chat_of_each_part() -> None:
    history = picture().history
    worst = [value for value in history.worst("gap", 30, 60.0) if value is not None]
    assert max(worst) == max(history.values("gap")) == figures_of("gap")
    assert history.worst("ttft", 1, 900.0) == [figures_of("ttft")]


def figures_of(name: str) -> float:
    return max(float(chat[name]) for snapshot in SNAPSHOTS for chat in snapshot["chats"] if chat[name] is not None)


def test_a_snapshot_counts_once_and_a_server_that_began_anew_begins_anew() -> None:
    history = picture().history
    known, chats = len(history.snapshots), len(history.chats)
    history.add(SNAPSHOTS[-1])
    assert (len(history.snapshots), len(history.chats)) == (known, chats)
    history.add(SNAPSHOTS[0] | {"time": SNAPSHOTS[-1]["time"] + 5})
    assert len(history.snapshots) == 1 and history.last_rates() == (0.0, 0.0) and history.change("steps", 10) is None


def test_what_is_kept_is_bounded() -> None:
    history = History()
    chat = {"time": 0.0, "ttft": 0.1, "gap": None}
    for second in range(2000):
        history.add(SNAPSHOTS[-1] | {"time": float(second), "chats": [chat | {"time": float(second)}] * 3})
    assert len(history.snapshots) <= 902 and len(history.chats) <= 3 * 901 and history.span() == 900.0


def test_spark_lines() -> None:
    assert figures.spark([None, 0.0, 0.1, 4.0, 8.0, 99.0], 8.0, figures.UNICODE) == ["  ▁▄██"]
    assert figures.spark([1.0, 4.0, 6.0, 8.0], 8.0, figures.UNICODE, 2) == ["  ▄█", "▂███"]
    assert figures.bar(0.5, 4, figures.ASCII) == "##.." and figures.bar(7.0, 2, figures.ASCII) == "##"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (figures.seconds(None), "-"), (figures.seconds(0.0042), "4.2 ms"), (figures.seconds(0.25), "250 ms"),
        (figures.seconds(1.5), "1.50 s"), (figures.seconds(42.0), "42.0 s"), (figures.seconds(3600.0), "1 h"),
        (figures.duration(3725), "1 h 2 min"), (figures.duration(185), "3 min 5 s"), (figures.duration(9e4), "1 d 1 h"),
        (figures.duration(7), "7 s"), (figures.percent(0.995), "99.5 %"), (figures.percent(1.0), "100 %"),
        (figures.count(1234567.0), "1,234,567"), (figures.shortened("abcdefgh", 6), "abcd.."),
        (figures.shortened("漢字漢字", 6), "漢字.."),
    ],
)  # fmt: skip
def test_figures_as_people_read_them(made: str, text: str) -> None:
    assert made == text


def test_objectives_and_limits() -> None:
    assert limit_of("ttft_p99=1s,ttft_mean=300ms,tbt_p99=5%", "ttft") == 0.3
    assert limit_of("ttft_p99=1s;agent:e2e_p99=20s", "ttft") == 1.0
    assert limit_of("5%", "ttft") is None and limit_of(None, "ttft") is None and limit_of("new_p99=1s", "ttft") is None
    assert standing({"objective": "tbt_mean=5%", "value": 0.05, "bound": None, "attainment": None})[:2] == (
        "TBT mean", "50 ms",
    )  # fmt: skip
    premium = {"objective": "premium:tbt_p99=50ms", "value": 0.04, "bound": 0.05, "attainment": 0.995}
    assert standing(premium)[:2] == ("premium TBT P99", "40 ms of 50 ms, kept by 99.5 %")
    estimated = {"status": "in_progress", "metadata": {"tidemill.eta": "145"}}
    assert time_left(estimated, 20.0) == 125.0 and time_left(estimated, 150.0) == 0.0
    assert time_left(estimated | {"metadata": None}, 20.0) is None
    assert time_left(estimated | {"status": "finalizing"}, 20.0) is None


# ---- following


class Scripted(TopClient):
    """`turns`: for each connection the error that it meets, or the snapshots that it gives."""

    def __init__(self, *turns: Exception | list[dict[str, Any]]) -> None:
        super().__init__(ChatOptions(URL))
        self.turns = iter(turns)

    def call(self, method: str, path: str, body: Any = None, **query: str | int) -> dict[str, Any]:
        answers: dict[str, dict[str, Any]] = {
            "/version": {"version": "0.1.0"},
            "/dashboard/history": {"snapshots": []},
            "/v1/batches": {"data": []},
        }
        return answers[path]

    def first_model(self) -> str:
        self.turn = next(self.turns)
        if isinstance(self.turn, Exception):
            raise self.turn
        return "tidemill-demo"

    def snapshots(self) -> Iterator[dict[str, Any]]:
        assert not isinstance(self.turn, Exception)
        yield from self.turn


def follow(*turns: Exception | list[dict[str, Any]]) -> list[str]:
    """The first lines of what is shown until the script ends."""
    follower = StatsFollower(Scripted(*turns), Picture(URL), lambda _: None)
    shown: list[str] = []
    with pytest.raises((StopIteration, RuntimeError)):
        follower.run(lambda: shown.append(" ".join(printed(follower.picture, 160).splitlines()[0].split())))
    return shown


def test_a_server_that_is_away_is_said_and_asked_again() -> None:
    away = ChatError(f"cannot reach {URL}: Connection refused")
    shown = follow(away, SNAPSHOTS[:2], away, SNAPSHOTS[2:3])
    head = f"tidemill 0.1.0 tidemill-demo {URL}"
    assert shown == [
        f"tidemill {URL} cannot reach {URL}: Connection refused; trying again",
        f"{head} no figures", f"{head} ready", f"{head} ready", f"{head} the server ended the stream; reconnecting",
        f"{head} cannot reach {URL}: Connection refused; trying again",
        f"{head} ready", f"{head} ready", f"{head} the server ended the stream; reconnecting",
    ]  # fmt: skip


def test_what_will_not_change_ends_it_and_what_may_does_not() -> None:
    assert len(follow(RefusedError("starting", 503), ChatError("x"))) == 2
    follower = StatsFollower(Scripted(RefusedError("no such key", 401)), Picture(URL), lambda _: None)
    with pytest.raises(RefusedError, match="no such key"):
        follower.run(lambda: None)


def test_figures_of_another_version_are_one_clear_error() -> None:
    for other in ({"time": 1.0}, [], SNAPSHOTS[0] | {"units": {}}):
        first, second = follow([other])  # type: ignore[list-item]
        assert first.endswith("no figures") and "this version cannot read the server's figures" in second


# ---- over HTTP


async def top(url: str, key: str | None = None) -> str:
    out = io.StringIO()
    assert await asyncio.to_thread(run_top, ChatOptions(url, key), out) == 0
    return out.getvalue()


async def test_a_print_knows_the_chat_before_it(start_server: StartServer) -> None:
    """With no page open the last snapshot is up to ten seconds old: the print was of a server without chats."""
    served = await start_server("hello world")
    recorder = served.app.state.recorder
    recorder._engine_clock = lambda: 0.0  # the fake engine's
    await recorder.record()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "?"}]}
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{served.url}/v1/chat/completions", json=body)).status_code == 200
    recorder._clock = lambda: time.time() + 1.5
    assert "no chat yet" not in await top(served.url)


async def test_batches_are_shown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with batch_server(tokenizer, tmp_path) as (served, client):
        batch = await submit(client, jsonl(line(i) for i in range(3)))
        assert batch.id[:18] in await top(served.url)


async def test_the_command_takes_address_and_key_from_the_environment(start_server: StartServer) -> None:
    served = await start_server("hi", api_key=("secret",))
    environment = os.environ | {"TIDEMILL_URL": served.url, "TIDEMILL_API_KEY": "secret", "COLUMNS": "120"}

    async def run(*flags: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "top", *flags,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )  # fmt: skip
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    code, out, err = await run()
    assert (code, err) == (0, "") and MODEL in out and "\x1b" not in out
    code, out, err = await run("--api-key", "wrong")
    assert code == 1 and out == "" and err.startswith("tidemill: ") and err.count("\n") == 1


async def test_a_key_without_the_right_to_figures_sees_its_batches(start_server: StartServer, tmp_path: Path) -> None:
    served = await start_server("hi", api_key_file=keys_of(tmp_path, "a a", "b b"))
    assert "this API key may see its own batches only" in await top(served.url, "a")


async def test_a_live_stream_follows_and_ends_with_the_server(start_server: StartServer) -> None:
    served = await start_server("hi")
    states: list[str] = []
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    follower = StatsFollower(TopClient(ChatOptions(served.url)), Picture(served.url), lambda _: sys.exit())

    def show() -> None:
        states.append(follower.picture.trouble)
        if len(states) == 2:
            loop.call_soon_threadsafe(seen.set)

    def run() -> None:
        with pytest.raises(SystemExit):
            follower.run(show)

    following = asyncio.create_task(asyncio.to_thread(run))
    await seen.wait()
    await served.app.state.recorder.stop()
    await following
    assert states[:2] == ["", ""] and states[-1] == "the server ended the stream; reconnecting"
    assert follower.picture.history.latest is not None


def test_no_server_at_the_first_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert "tidemill: cannot reach http://127.0.0.1:1: " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--url"):
        run_top(ChatOptions("nowhere"), io.StringIO())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
async def test_ctrl_c_on_a_terminal_puts_it_back(start_server: StartServer) -> None:
    """A real process on a terminal of its own, and a real signal."""
    served = await start_server("hi")
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "gateway", "top", "--url", served.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=slave, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    shown = await asyncio.to_thread(read_until, master, lambda data: b"requests" in data)
    process.send_signal(signal.SIGINT)
    rest = threading.Thread(target=lambda: ended.append(read_until(master, lambda _: False)))
    ended: list[bytes] = []
    rest.start()
    assert await process.wait() == 0
    await asyncio.to_thread(rest.join)
    os.close(master)
    assert b"\x1b[?1049h" in shown and b"\x1b[?25l" in shown, "a screen of its own"
    assert b"\x1b[?1049l" in ended[0] and b"\x1b[?25h" in ended[0] and b"Traceback" not in ended[0]


def read_until(terminal: int, enough: Callable[[bytes], bool]) -> bytes:
    data = b""
    while not enough(data):
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        data += piece
    return data
