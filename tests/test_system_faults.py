"""Refusals of the machine (descriptors, threads, memory, room on a disk) ends neither the server nor a start."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import has_ended, until
from support.tables import for_each, mostly_slow
from test_process import collect, engine_process, request, summed, undisturbed, until_idle

from engine.client import EngineState
from engine.errors import ConfigError, EngineUnavailableError, ModelLoadError
from engine.machine import child as machine
from engine.process import child, frames
from engine.process.launcher import Child
from engine.process.requests import RestartPolicy
from engine.process.suspects import CAUSES, Origin, Outage, is_of_system, origin_of, start_error

pytestmark = pytest.mark.cpu_limit(12)  # each engine process imports for a second
__all__ = ["undisturbed"]
OF_A_DEAD_PROCESS = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESRCH, errno.ECHILD}
REFUSALS = [OSError(number, os.strerror(number)) for number in sorted(errno.errorcode.keys() - OF_A_DEAD_PROCESS)]
NO_THREAD = RuntimeError("can't start new thread")
TORCH_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)")


@for_each("number", sorted(errno.errorcode))
def test_every_errno_is_of_the_system_but_those_of_a_dead_process(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert is_of_system(error) is (number not in OF_A_DEAD_PROCESS)


def test_other_errors_are_of_the_system_only_where_it_refused_something() -> None:
    def wrapped(cause: Exception) -> ModelLoadError:
        try:
            try:
                raise cause
            except type(cause):
                raise ModelLoadError("the model cannot be read") from None
        except ModelLoadError as error:
            return error

    for error in (MemoryError(), NO_THREAD, TORCH_MEMORY, wrapped(OSError(errno.ESTALE, "stale"))):
        assert is_of_system(error), error
    for other in (None, ConfigError("no"), RuntimeError("CUDA error"), wrapped(ValueError("no")), TimeoutError()):
        assert not is_of_system(other), other
    assert str(start_error(MemoryError())) == "the engine process: MemoryError"


def test_the_table_names_an_origin_for_every_cause_that_the_code_gives() -> None:
    assert {origin_of(cause) for cause in CAUSES} == set(Origin)
    assert origin_of("a new one") is Origin.REQUEST, "nothing is forgiven by mistake"


def test_an_outage_backs_off_and_logs_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    assert [outage.refused("no room", 30.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert outage.refused("no thread", 30.0) == 30 and outage.why == "no thread"
    outage.end()
    assert outage.why is None and outage.refused("no room", 30.0) == 1
    assert [record.getMessage().count("does not let") for record in caplog.records] == [1, 1, 0, 1]


async def test_a_start_that_the_system_refuses_is_tried_for_ever(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every errno in turn, far more often than processes may die."""
    refusals: Iterator[Exception] = iter([*REFUSALS, NO_THREAD, MemoryError()])
    shown = set()

    def spawn(*arguments: Any) -> Child:
        shown.add(engine.trouble)
        for error in refusals:
            raise error
        return real(*arguments)

    policy = RestartPolicy(2, max_delay=0.0)
    async with engine_process(tmp_path / "children", "before:2", policy=policy) as engine:
        real = Child.spawn
        monkeypatch.setattr(Child, "spawn", spawn)
        answer = await collect(engine, request("seeded", seed=3))
        assert summed(answer) == undisturbed["seeded"]
        assert (await engine.stats()).restarts == {"killed": 1, "system": len(REFUSALS) + 2}
        assert any(text is not None and "Too many open files; retrying" in text for text in shown)
        assert engine.trouble is None and len(policy._deaths) == 1
        await until_idle(engine)


async def test_a_process_that_is_gone_at_once_counts_as_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*_: Any) -> Child:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    async with engine_process(tmp_path / "children", policy=RestartPolicy(3, max_delay=0.0)) as engine:
        monkeypatch.setattr(Child, "spawn", spawn)
        engine.kill()
        assert "too often" in await engine.wait_dead()
        assert (await engine.stats()).restarts == {"killed": 1, "start": 2}


async def test_a_child_that_the_system_refuses_something_says_so(tmp_path: Path) -> None:
    """More starts than processes may die: the third has memory again."""
    policy = RestartPolicy(2, max_delay=0.0)
    async with engine_process(tmp_path / "children", "nomem:1:2-4", policy=policy) as engine:
        engine.kill()
        await until(lambda: engine.trouble is not None and "Cannot allocate memory" in engine.trouble)
        assert engine.state is EngineState.DEGRADED
        await collect(engine, request("a"))
        assert (await engine.stats()).restarts == {"killed": 1, "system": 3}


@pytest.mark.parametrize("state", mostly_slow(["full", "gone"], ["full"]))
async def test_the_number_of_the_process_is_a_convenience(
    state: str, tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process starts where its number cannot be noted, and the number of the last one does not stay."""
    folder = tmp_path / "state" / "children"
    folder.parent.mkdir()
    async with engine_process(folder) as engine:
        assert (tmp_path / "state" / "engine.pid").exists()
        if state == "gone":
            (tmp_path / "state").rename(tmp_path / "away")
        else:
            monkeypatch.setattr(Path, "write_text", _no_room)
        engine.kill()
        if state == "gone":
            await until(lambda: engine.trouble is not None)
            (tmp_path / "away").rename(tmp_path / "state")  # the scripted child counts itself there
        assert summed(await collect(engine, request("seeded", seed=3))) == undisturbed["seeded"]
        if state == "full":
            assert not (tmp_path / "state" / "engine.pid").exists()
            assert (await engine.stats()).restarts == {"killed": 1}


def _no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_child_is_reaped_where_no_thread_is_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any) -> None:
        raise NO_THREAD

    async with engine_process(tmp_path / "children") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "to_thread", no_thread)
            engine.kill()
            await collect(engine, request("a"))
        assert (await engine.stats()).restarts == {"killed": 1}


STARTER = """
import os, sys, threading, time
from pathlib import Path
from engine.config import EngineConfig
from engine.process import frames
from engine.process.launcher import Child

kept = []  # an engine whose socket closes ends by itself

def spawn():
    child = Child.spawn([sys.executable, "-P", *sys.argv[1:3], ""], frames.Launch(EngineConfig()))
    kept.append(child)
    child.receive()
    child.receive()
    print(child.process.pid, flush=True)

thread = threading.Thread(target=spawn)  # which ends before the process does
thread.start()
thread.join()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not end a child with its parent")
async def test_a_stopped_engine_ends_with_its_gateway(tmp_path: Path) -> None:
    """And does not end with the thread that asked for it."""
    (tmp_path / "children").mkdir()
    script = Path(__file__).parent / "scripted_child.py"
    command = [sys.executable, "-c", STARTER, str(script), str(tmp_path / "children")]
    gateway = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=machine.ROOT)
    assert gateway.stdout is not None
    try:
        pid = int(await gateway.stdout.readline())
        assert not has_ended(pid), "it outlives the thread that spawned it"
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text())
    finally:
        gateway.kill()
        await gateway.wait()
    await until(lambda: has_ended(pid))


def test_what_a_child_says_of_a_refused_start() -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    said = child._not_started(error, start_error(error))
    assert isinstance(said, frames.NotStarted) and said.cause == "system"
    assert isinstance(said.error.to_error(), EngineUnavailableError)
    assert child._not_started(ConfigError("no"), ConfigError("no")).cause == "start"
