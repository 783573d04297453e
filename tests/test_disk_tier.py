"""The disk behind the other tiers: what is written and read back, kept across restarts, and what faults cost."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, make_request
from fakes.runner import FakeRunner
from test_hybrid_scheduling import actions, make
from test_swap_faults import BLOCK, decoder
from test_tiers import DEAR_COPIES, TURN, batch, chat, serve

from engine.api import EngineInfo, EngineRequest, RequestClass
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.execution import disk as disk_module
from engine.execution.cpu.device import TorchDevice
from engine.execution.disk import DiskTier, Label
from engine.execution.runner import Runner
from engine.models.byte_cells import FLOATS, INTEGERS
from engine.scheduling.output import SchedulerOutput
from gateway.store.folder import open_state
from predictor.model import LatencyModel

KEY = bytes(range(16))
HOSTS = [0, 44]
"""Units of the host between device and disk: none, or room for less than two histories."""


@pytest.fixture(params=[0, 1])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def crowd(driver: Driver, start: int = 0, count: int = 4) -> None:
    """Chats that take the whole pool, one after another."""
    for number in range(start, start + count):
        serve(driver, make_request(f"other{number}", [number + 1] * 80, 4))


@pytest.mark.parametrize("host", HOSTS)
def test_what_leaves_the_tier_above_comes_back_from_the_disk(depth: int, host: int) -> None:
    driver = make(depth, blocks=24, host=host, disk_units=400)
    serve(driver, chat("first"))
    crowd(driver)
    assert serve(driver, chat("second")) == 0, "its last token alone, which counts as a decode"
    stats = driver.core.stats()
    assert stats.prefix_disk_hit_tokens == TURN - 1 and stats.prefix_host_hit_tokens == 0
    assert stats.disk_units_used > 0 and stats.disk_units_total == 400
    assert stats.cache_units["disk_read"] == 2 * ((TURN - 1) // 4)


def test_lines_and_dear_copies_do_not_reach_the_disk(depth: int) -> None:
    driver = make(depth, blocks=24, disk_units=400)
    for number in range(4):
        serve(driver, *batch(f"b{number}-", number))
    assert not actions(driver.steps)
    driver = make(depth, blocks=24, disk_units=400, model=DEAR_COPIES, disk_seconds=1)
    serve(driver, chat("first"))
    crowd(driver)
    assert serve(driver, chat("second")) == TURN and not actions(driver.steps)


@pytest.mark.parametrize("host", HOSTS)
def test_the_disk_is_charged_by_its_own_rate(depth: int, host: int) -> None:
    """Not by the host's, which is 50 times as fast here."""
    model = LatencyModel(intercept=0.01, prefill_tokens=1.0, transferred=1e-3)
    driver = make(depth, blocks=24, host=host, disk_units=400, model=model, disk_seconds=0.1)
    serve(driver, chat("first"))
    crowd(driver)
    assert serve(driver, chat("second")) == 0
    kinds = {CacheAction.WRITE: 50, CacheAction.READ: 50, CacheAction.SWAP_OUT: 1, CacheAction.SWAP_IN: 1}
    seen = set()
    for step in driver.steps:
        seen |= {operation.action for operation in step.operations}
        expected = sum(kinds[operation.action] * len(operation.source.units) for operation in step.operations)
        assert step.cache_work.transferred_bytes == expected
        assert step.predicted_latency is not None and step.predicted_latency >= 1e-3 * expected
    assert {CacheAction.WRITE, CacheAction.READ} <= seen and (CacheAction.SWAP_OUT in seen) == bool(host)


def test_a_full_disk_keeps_what_was_used_last(depth: int) -> None:
    driver = make(depth, blocks=12, disk_units=44)
    prompts = {name: [start + at for at in range(37)] for start, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        serve(driver, make_request(name, prompt, 1))
    assert serve(driver, make_request("c2", prompts["c"], 1)) == 0
    assert serve(driver, make_request("a2", prompts["a"], 1)) > 0


def test_a_later_process_finds_what_an_earlier_one_wrote(depth: int) -> None:
    driver = make(depth, blocks=24, disk_units=400)
    serve(driver, chat("first"))
    crowd(driver)
    again = successor(driver, depth, disk_units=400)
    block_hash, block = next(iter(driver.core._state.cache.tiers.disk._index.items()))
    again.core.adopt([(block.entry, block_hash)])  # twice the same is once
    assert serve(again, chat("second")) == 0
    assert again.core.stats().prefix_disk_hit_tokens == TURN - 1
    crowd(again, 10)  # the units that were taken over are given away like others
    again.core._state.cache.tiers.lose_disk()
    crowd(again, 20)
    assert serve(again, chat("third")) == TURN, "the disk is lost, and with it the history"
    assert again.core.stats().disk_units_used == 0


@pytest.mark.parametrize("host", HOSTS)
def test_a_step_that_fails_costs_itself_alone(depth: int, host: int) -> None:
    """Every step that writes or reads fails once, behind its operations."""

    def story(fail: frozenset[int]) -> Driver:
        driver = make(depth, blocks=24, host=host, disk_units=400, fail=fail)
        serve(driver, chat("first"))
        crowd(driver)
        serve(driver, chat("second"))
        return driver

    wanted = [step.step_id for step in story(frozenset()).steps if step.operations]
    for step_id in wanted:
        assert story(frozenset({step_id})).core.stats().failed_steps == 1


def keep(driver: Driver, steps: int = 1000) -> list[SchedulerOutput]:
    """An orderly end that has time for so many steps; what they were."""
    taken: list[SchedulerOutput] = []
    for output in driver.core.keep_prefixes():
        if len(taken) == steps:
            break
        driver.core.update(output, driver.runner.launch(output)(), driver.now)
        taken.append(output)
    return taken


def successor(driver: Driver, depth: int, **options: int) -> Driver:
    """A process that starts with what another one left on the disk."""
    disk = driver.core._state.cache.tiers.disk
    again = make(depth, blocks=24, **options)
    assert isinstance(driver.runner, FakeRunner) and isinstance(again.runner, FakeRunner)
    again.runner._units = {place: cells for place, cells in driver.runner._units.items() if place[0] is Tier.DISK}
    again.core.adopt((block.entry, block_hash) for block_hash, block in disk._index.items())
    return again


@pytest.mark.parametrize("host", HOSTS)
def test_an_orderly_end_keeps_what_only_memory_holds(depth: int, host: int) -> None:
    driver = make(depth, blocks=24, host=host, disk_units=400)
    serve(driver, chat("first"))
    serve(driver, make_request("other", [1] * 30, 4))
    if host:
        serve(driver, make_request("more", [2] * 40, 4))  # which sends part of the first chat to the host
    line = make_request("line", [3] * 9, 1, request_class=RequestClass.OFFLINE)
    serve(driver, line)
    assert CacheAction.WRITE not in actions(driver.steps)
    steps = keep(driver)
    assert {operation.action for step in steps for operation in step.operations} == {CacheAction.WRITE}
    assert not any(step.chunks for step in steps)
    driver.core.check_integrity()
    assert not keep(driver), "all of it is there now"
    again = successor(driver, depth, disk_units=400)
    for prompt in (list(range(TURN)), [1] * 30):
        assert serve(again, make_request(f"again{len(prompt)}", prompt, 2)) <= 2
    assert serve(again, line) == 9, "nobody comes back for a line"


def test_a_short_end_keeps_the_heads_of_what_was_used_last(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.KEPT_BYTES", 2)  # a block in a step
    driver = make(depth, blocks=24, disk_units=400)
    for start in (0, 7):
        serve(driver, make_request(f"c{start}", list(range(start, start + 33)), 1))
    assert len(keep(driver, steps=6)) == 6
    again = successor(driver, depth, disk_units=400)
    assert serve(again, make_request("last", list(range(7, 40)), 1)) == 33 - 6 * 4
    assert serve(again, make_request("earlier", list(range(33)), 1)) == 33
    # and what does not fit on the disk leaves out what was used first
    driver = make(depth, blocks=24, disk_units=16)
    for start in (0, 7):
        serve(driver, make_request(f"c{start}", list(range(start, start + 33)), 1))
    assert len(keep(driver)) == 8
    again = successor(driver, depth, disk_units=16)
    assert serve(again, make_request("last", list(range(7, 40)), 1)) == 0


def test_an_end_keeps_nothing_where_it_may_not(depth: int) -> None:
    """Without a disk, on one that failed, where copies do not pay, and while somebody still runs."""
    dear = {"model": DEAR_COPIES, "disk_seconds": 1}
    for options in ({}, {"disk_units": 400}, {"disk_units": 400, **dear}):
        driver = make(depth, blocks=24, **options)  # type: ignore[arg-type]
        serve(driver, chat("first"))
        if options == {"disk_units": 400}:
            driver.core._state.cache.tiers.lose_disk()
        assert not any(step.operations for step in keep(driver))
    driver.add(chat("left"))
    assert not keep(driver)


# --- the file ----------------------------------------------------------------------------------------------------


def real(folder: Path | None, blocks: int = 12, disk_units: int = 60, key: bytes = KEY) -> Driver:
    sizes = {"num_units": 2 * blocks, "block_size": BLOCK, "max_num_seqs": 8, "max_model_len": 64}
    units = {"disk_units": disk_units} if folder else {}
    config = SchedulerConfig(**sizes, max_num_batched_tokens=64, unit_bytes=1, **units)
    runner = Runner(TorchDevice(decoder(), config.limits))
    driver = Driver(runner, config)
    if folder is not None:
        runner.disk = DiskTier(folder, runner.device.pool, disk_units, key)
        driver.core.adopt(runner.disk.found)
    return driver


def close(driver: Driver) -> None:
    assert isinstance(driver.runner, Runner) and driver.runner.disk is not None
    driver.runner.disk.close()


def turn_request(name: str, start: int = 3) -> EngineRequest:
    return make_request(name, [(start + at) % 90 for at in range(33)], 4)


def turn(driver: Driver, name: str, start: int = 3) -> list[int]:
    driver.add(turn_request(name, start))
    driver.run()
    return driver.outputs[name]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Path, list[int]]]:
    """A folder that holds a chat's history, and the chat's answer."""
    driver = real(tmp_path)
    expected = turn(driver, "first")
    for number in range(3):
        turn(driver, f"other{number}", 20 + number)
    assert turn(driver, "second") == expected and driver.core.stats().prefix_disk_hit_tokens == 32
    for number in range(3):
        turn(driver, f"another{number}", 30 + number)
    close(driver)
    yield tmp_path, expected


def test_a_history_outlives_its_process(written: tuple[Path, list[int]]) -> None:
    folder, expected = written
    driver = real(folder)
    assert turn(driver, "third") == expected
    assert driver.core.stats().prefix_disk_hit_tokens == 32 and driver.core.stats().failed_steps == 0
    close(driver)
    for other in (real(folder, key=bytes(16)), real(folder, disk_units=60)):  # another model; and its file begins anew
        assert turn(other, "fourth") == expected and other.core.stats().prefix_disk_hit_tokens == 0
        close(other)


@pytest.mark.parametrize("damage", ["bytes", "short", "swapped"])
def test_a_damaged_file_is_a_miss(written: tuple[Path, list[int]], damage: str) -> None:
    folder, expected = written
    path = folder / "units-0"
    data = bytearray(path.read_bytes())
    slot = (len(data) - 4096) // 61
    driver = real(folder)  # what it found in the headers is what is damaged now
    if damage == "bytes":
        for at in range(4096, len(data), slot):
            data[at + 100] ^= 1
    elif damage == "swapped":
        data[4096:] = data[4096 + slot :] + data[4096 : 4096 + slot]
    path.write_bytes(data[: 4096 + slot // 2] if damage == "short" else data)
    assert turn(driver, "third") == expected
    assert driver.core.stats().failed_steps >= 1 and driver.core.stats().prefix_disk_hit_tokens > 0
    assert turn(driver, "fourth") == expected
    close(driver)


def test_a_disk_that_refuses_a_write_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = real(tmp_path)
    expected, whole = turn(driver, "first"), os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for number in range(3):
        turn(driver, f"other{number}", 20 + number)
    assert isinstance(driver.runner, Runner) and driver.runner.disk is not None
    driver.runner.disk._thread.submit(lambda: None).result()  # all writes have been tried
    monkeypatch.setattr(os, "pwrite", whole)
    turn(driver, "another", 50)
    assert driver.runner.disk.failed and driver.core.stats().disk_units_used == 0
    assert turn(driver, "second") == expected
    close(driver)


class Clock:
    """Seconds that pass when the test says so, and hardly otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


class Gate:
    """A call to the disk that waits while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._open, self._call = threading.Event(), getattr(os, name)
        self._open.set()
        self.release, self.shut = self._open.set, self._open.clear
        monkeypatch.setattr(os, name, self._behind)

    def _behind(self, *args: Any) -> Any:
        self._open.wait()
        return self._call(*args)


def test_a_disk_that_hangs_is_left_alone_until_it_answers(
    written: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads waits for it as long as it may, and no other does."""
    folder, expected = written
    clock, gate = Clock(), Gate(monkeypatch, "preadv")
    monkeypatch.setattr(disk_module, "time", clock)
    monkeypatch.setattr(disk_module, "PATIENCE_SECONDS", 0.02)
    driver = real(folder)
    assert isinstance(driver.runner, Runner) and driver.runner.disk is not None
    disk, stats = driver.runner.disk, driver.core.stats
    disk.measure()
    gate.shut()
    assert turn(driver, "third") == expected
    assert stats().failed_steps == 1 and stats().prefix_disk_hit_tokens == 32, "what came late was computed"
    clock.now += 100
    turn(driver, "others", 40)  # in the meantime the engine is told
    for number in range(3):
        turn(driver, f"another{number}", 50 + number)
    assert turn(driver, "fourth") == expected
    assert stats().failed_steps == 1 and stats().prefix_disk_hit_tokens == 32, "it was computed without asking"
    gate.release()
    while disk.seconds > 1:
        time.sleep(0.001)
    turn(driver, "more", 60)  # the engine is told again
    assert turn(driver, "fifth") == expected
    for number in range(3):
        turn(driver, f"last{number}", 70 + number)
    assert turn(driver, "sixth") == expected
    assert stats().failed_steps == 1 and stats().prefix_disk_hit_tokens >= 64
    close(driver)


def test_a_slow_disk_is_tried_again(written: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(disk_module, "time", clock)
    monkeypatch.setattr(disk_module, "PATIENCE_SECONDS", 1e6)
    folder, expected = written
    driver = real(folder)
    assert isinstance(driver.runner, Runner) and driver.runner.disk is not None
    disk, call = driver.runner.disk, os.preadv

    def slow(*args: Any) -> int:
        clock.now += 50
        return call(*args)

    clock.now = 1.0
    disk.measure()
    monkeypatch.setattr(os, "preadv", slow)
    assert turn(driver, "third") == expected and driver.core.stats().failed_steps == 0
    assert disk.seconds == pytest.approx(50, abs=1)
    monkeypatch.setattr(os, "preadv", call)
    while disk.seconds > 1:
        if disk._trial is None or disk._trial.done():
            clock.now += disk_module.TRY_SECONDS + 1
        time.sleep(0.001)
    close(driver)


def test_what_finds_no_room_to_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "pwrite")
    monkeypatch.setattr(disk_module, "PATIENCE_SECONDS", 0.01)
    driver = real(tmp_path)
    expected = turn(driver, "first")
    assert isinstance(driver.runner, Runner) and driver.runner.disk is not None
    disk = driver.runner.disk
    monkeypatch.setattr(disk_module, "PENDING_BYTES", 5 * disk._unit_bytes)
    gate.shut()
    for number in range(3):
        turn(driver, f"other{number}", 20 + number)
    assert len(disk._writes) == 6, "none is begun beside those that wait"
    gate.release()
    assert turn(driver, "second") == expected
    close(driver)


def test_a_disk_without_room_is_met_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        real(tmp_path)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
async def test_a_server_that_ends_in_order_writes_its_chats(tmp_path: Path, seconds: float) -> None:
    driver = real(tmp_path)
    engine = Engine(driver.core, driver.runner, EngineInfo(64, 97, frozenset(), "tiny", "float32", "cpu", 0))
    await engine.start()
    (stream,) = await engine.submit([turn_request("first")])
    expected = [token async for output in stream for token in output.token_ids]
    await engine.stop(seconds, keep_seconds=0.0)
    close(driver)
    again = real(tmp_path)
    assert turn(again, "second") == expected
    assert again.core.stats().prefix_disk_hit_tokens == (32 if seconds else 0)
    close(again)


@pytest.mark.parametrize("survives", [0, 1])
def test_an_end_that_is_cut_off_leaves_whole_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """K has arrived of every block and V of some, when the process is killed."""
    driver = real(tmp_path)
    expected, put, arrived = turn(driver, "first"), DiskTier._put, []

    def cut_off(disk: DiskTier, slot: int, label: Label, data: bytes) -> None:
        if label.part == 0 or len(arrived) < 3 * survives:
            arrived.extend([slot] * label.part)
            put(disk, slot, label, data)

    monkeypatch.setattr(DiskTier, "_put", cut_off)
    keep(driver)
    close(driver)
    monkeypatch.undo()
    again = real(tmp_path)
    assert turn(again, "second") == expected and again.core.stats().failed_steps == 0
    assert again.core.stats().prefix_disk_hit_tokens == 12 * survives
    close(again)


async def test_a_disk_that_fails_at_the_end_costs_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = real(tmp_path)
    engine = Engine(driver.core, driver.runner, EngineInfo(64, 97, frozenset(), "tiny", "float32", "cpu", 0))
    await engine.start()
    (stream,) = await engine.submit([turn_request("first")])
    assert [output async for output in stream][-1].error is None

    def gone(_disk: DiskTier, _batch: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskTier, "write", gone)
    await engine.stop(60.0)
    assert "cache of chats" in caplog.text
    close(driver)


def test_two_engines_have_a_file_each(tmp_path: Path) -> None:
    drivers = [real(tmp_path), real(tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["units-0", "units-1"]
    for driver in drivers:
        close(driver)


@pytest.mark.parametrize("cell_type", [None, INTEGERS, FLOATS], ids=str)
def test_units_of_every_kind_come_back_and_lost_ones_are_nan(tmp_path: Path, cell_type: torch.dtype | None) -> None:
    device = TorchDevice(
        decoder(), SchedulerConfig(num_units=8, max_model_len=16, block_size=BLOCK).limits, cell_type=cell_type
    )
    pool = device.pool
    pool.units[:2].view(torch.uint8).random_(0, 100, generator=torch.Generator().manual_seed(0))
    disk = DiskTier(tmp_path, pool, 6, KEY)
    here, there, back = (
        CacheEntry(CacheKind.KV, tier, units)
        for tier, units in ((Tier.DEVICE, (0, 1)), (Tier.DISK, (5, 2)), (Tier.DEVICE, (7, 4)))
    )
    disk.write([CacheOperation(CacheAction.WRITE, here, there, key=KEY)])
    for _ in range(2):  # on its way, and when it has arrived
        disk.read([CacheOperation(CacheAction.READ, there, back, key=KEY)])
        assert torch.equal(pool.units[[7, 4]].view(torch.uint8), pool.units[[0, 1]].view(torch.uint8))
        disk._thread.submit(lambda: None).result()
    assert disk.measure() > 0
    disk.read([CacheOperation(CacheAction.READ, there, back, key=bytes(16))])  # another block's
    assert pool.read(pool.slice_ids(torch.tensor([7, 4]).numpy()).flatten()).isnan().all()
    disk.close()
    again = DiskTier(tmp_path, pool, 6, KEY)
    assert again.found == [(there, KEY)]
    again.close()


def test_tenants_meet_their_own_prefixes_after_a_restart(tmp_path: Path) -> None:
    secrets = set()
    for _ in range(2):
        folder = open_state(tmp_path)
        secrets |= {folder.secret(), folder.secret()}
        folder.close_now()
    assert len(secrets) == 1 and (tmp_path / "salt").stat().st_mode & 0o777 == 0o600
    (tmp_path / "salt").write_bytes(b"short")
    folder = open_state(tmp_path)
    assert folder.secret() not in secrets
    folder.close_now()
