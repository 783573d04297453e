"""Servers and commands whose standard streams cannot be written: a full disk, an ended reader, closed streams."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.machine.child import TextOutput
from tidemill import cli
from tidemill.commands import state

CLOSE = {"stdout": ">&-", "stderr": "2>&-"}


@contextmanager
def broken(kind: str) -> Iterator[int]:
    """Yield a descriptor to which nothing can be written; DEVNULL for `closed`, which the shell closes."""
    if kind == "closed":
        yield subprocess.DEVNULL
        return
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def command(words: list[str], **streams: str) -> list[str]:
    """Return the command line, behind a shell that closes the streams that are `closed`."""
    closing = " ".join(CLOSE[name] for name, kind in streams.items() if kind == "closed")
    return ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-m", "gateway", *words]


@pytest.mark.parametrize(
    ("words", "stream", "kind", "code", "said"),
    [
        ("version", "stdout", "full", 1, "tidemill: standard output cannot be written: No space left on device\n"),
        ("version", "stdout", "ended", cli.BROKEN_PIPE, ""),
        ("version", "stdout", "closed", 0, ""),
        ("serve --help", "stdout", "ended", 0, ""),
        ("serve --port x", "stderr", "full", 2, ""),
        ("serve --port x", "stderr", "ended", 2, ""),
        ("fleet restart --state-dir /nonexistent", "stderr", "closed", 2, ""),
    ],
)
def test_the_exit_code_of_a_command(words: str, stream: str, kind: str, code: int, said: str) -> None:
    other = "stderr" if stream == "stdout" else "stdout"
    with broken(kind) as descriptor:
        streams = {stream: descriptor, other: subprocess.PIPE}
        line = command(words.split(), **{stream: kind})
        done = subprocess.run(line, text=True, timeout=60, check=False, **streams)  # type: ignore[call-overload]
    assert (done.returncode, getattr(done, other)) == (code, said)


@pytest.mark.parametrize("kind", ["full", "ended"])
def test_work_is_done_although_its_lines_are_lost(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "restart", lambda _state_dir: "line " * 5000)
    with broken(kind) as descriptor, open(descriptor, "w", closefd=False, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["fleet", "restart"]) == 0
        print("the descriptor is the null device now", flush=True)


def test_text_that_was_not_written_is_tried_again_and_every_path_can_be_shown() -> None:
    class Disk(io.StringIO):
        is_full = True

        def flush(self) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")

    disk = Disk()
    output = TextOutput(disk, drops=True)
    print("first", file=output, flush=True)  # type: ignore[arg-type]
    assert output.error is not None
    disk.is_full = False
    print("second", file=output, flush=True)  # type: ignore[arg-type]
    assert disk.getvalue() == "first\nsecond\n"
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, "ascii")
    print("/models/\udcff", file=TextOutput(terminal, drops=False), flush=True)  # type: ignore[arg-type]
    assert raw.getvalue() == b"/models/\\udcff\n"


async def _ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError(f"the server ended with {process.returncode}")


async def _counters(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    monotone = [family for family in families if family.type in {"counter", "histogram"}]
    return {(s.name, str(s.labels)): s.value for family in monotone for s in family.samples}


async def _complete(client: httpx.AsyncClient) -> None:
    for tier in ("default", "flex"):
        asked = {"model": "tidemill-demo", "prompt": "hi", "max_tokens": 3, "service_tier": tier}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200


@pytest.mark.parametrize(
    ("out", "errors"),
    [
        pytest.param("ended", "full", marks=pytest.mark.slow),
        pytest.param("full", "ended", marks=pytest.mark.slow),
        pytest.param("closed", "closed", marks=pytest.mark.slow),
    ],
)
async def test_a_server_replaces_its_engine_and_no_counter_falls(tmp_path: Path, out: str, errors: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    flags = ["--port", url.rpartition(":")[2], "--device", "cpu", "--profile-seconds", "0", "--slo", "ttft_p99=60s"]
    line = command(["serve", *flags, "--state-dir", str(tmp_path / "state")], stdout=out, stderr=errors)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with broken(out) as stdout, broken(errors) as stderr:
        process = await asyncio.create_subprocess_exec(*line, stdout=stdout, stderr=stderr, env=environment)
    pid_file, judged = tmp_path / "state" / "engine.pid", ("tidemill_slo_requests_total", str({"good": "true"}))
    try:
        await _ready(url, process)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await _complete(client)
            seen = await _counters(client)
            assert seen[judged] == 1.0 and seen["tidemill_offline_tokens_total", "{}"] > 0
            first = pid_file.read_text()
            os.kill(int(first), signal.SIGKILL)
            while not pid_file.exists() or pid_file.read_text() in ("", first):
                assert process.returncode is None
                await asyncio.sleep(0.05)
                before, seen = seen, await _counters(client)
                assert not {key: (was, seen.get(key)) for key, was in before.items() if seen.get(key, -1.0) < was}
            await _ready(url, process)
            await _complete(client)
            before, seen = seen, await _counters(client)
        assert not {key: (was, seen.get(key)) for key, was in before.items() if seen.get(key, -1.0) < was}
        assert seen[judged] == 2.0 and seen["tidemill_engine_restarts_total", str({"cause": "killed"})] == 1.0
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
