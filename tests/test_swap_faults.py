"""Faults of the host tier on the real runner: a copy that fails half-way, and NaN in restored units."""

import functools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from driver import Driver, make_request
from tiny_models import llama_config

from engine.api import EngineRequest, FinishReason
from engine.cache.blocks import CacheAction
from engine.execution import stream
from engine.execution.cpu.device import TorchDevice
from engine.execution.runner import Runner
from engine.execution.stream import HostUnits
from engine.limits import SchedulerConfig
from engine.models.decoder import Decoder
from engine.models.spec import spec_from_config
from engine.models.weights import DummyTensors, build_weights

BLOCK = 4
CPU = torch.device("cpu")
OUTPUT = 20


@functools.cache
def decoder() -> Decoder:
    spec = spec_from_config(llama_config(num_key_value_heads=4))
    return Decoder(spec, build_weights(spec, DummyTensors(0, torch.float32, CPU)))


def make(depth: int = 0, blocks: int = 12) -> Driver:
    sizes = {"num_units": 2 * blocks, "block_size": BLOCK, "max_num_seqs": 8, "max_model_len": 64}
    config = SchedulerConfig(**sizes, max_num_batched_tokens=64, host_units=200, unit_bytes=1, pipeline_depth=depth)
    runner = Runner(TorchDevice(decoder(), config.limits, host_units=200))
    return Driver(runner, config)


def requests_of() -> list[EngineRequest]:
    return [make_request(str(i), [10 + i, 20 + i, 30, 40 + i, 50, 60 + i], OUTPUT) for i in range(4)]


@functools.cache
def solo(index: int) -> list[int]:
    driver = make(blocks=30)
    request = requests_of()[index]
    driver.add(request)
    driver.run()
    return driver.outputs[request.request_id]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("action", [CacheAction.SWAP_OUT, CacheAction.SWAP_IN])
def test_a_copy_that_fails_half_way_costs_its_step_alone(
    action: CacheAction, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory after half of the `failing`th batch of copies: no request reads a copy that may be half written."""
    name = "swap_in" if action is CacheAction.SWAP_IN else "swap_out"
    whole, batches = getattr(TorchDevice, name), []

    def swap(device: TorchDevice, pairs: np.ndarray) -> None:
        batches.append(pairs)
        if len(batches) == failing + 1:
            whole(device, pairs[: len(pairs) // 2])
            raise RuntimeError("no memory for the copy")
        whole(device, pairs)

    monkeypatch.setattr(TorchDevice, name, swap)
    driver = make()
    requests = requests_of()
    driver.add(*requests)
    driver.run()
    assert len(batches) > failing, "no such copy was made"
    for index, request in enumerate(requests):
        assert driver.finals[request.request_id].finish_reason is FinishReason.LENGTH
        assert driver.outputs[request.request_id] == solo(index)
    stats = driver.stats()
    assert (stats.host_units_used - stats.host_units_cached, stats.units_owned) == (0, 0)


def pieces_of(monkeypatch: pytest.MonkeyPatch, refused: int = 99) -> tuple[HostUnits, list[tuple[int, ...]]]:
    """Host memory for a GPU: 22 units of 2 KiB in six pieces, and calls that lock (3) and unlock (1) pieces, of which
    the driver refuses the last from number `refused` on. Only its thread locks: no launch waits for all pieces."""
    calls: list[tuple[int, ...]] = []

    def register(*call: int) -> int:
        assert threading.current_thread().name == "tidemill-page-lock"
        calls.append(call)
        return int(len(calls) > refused)

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda *call: calls.append(call))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(stream, "LOCKED_BYTES", 5000)
    memory = HostUnits(22, 1024, torch.bfloat16, torch.device("cuda"))
    assert memory.per_piece == 4, "whole pages"
    return memory, calls


def settled(memory: HostUnits) -> HostUnits:
    """Return the memory when its thread has ended."""
    assert memory._thread is not None
    memory._thread.join()
    return memory


def test_host_memory_is_locked_in_pieces_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, calls = pieces_of(monkeypatch)
    begin = memory.units.data_ptr()
    assert begin % 4096 == 0 and not calls
    memory.lock_all()
    settled(memory)
    assert calls == [(begin + at * 8192, 8192 if at < 5 else 4096, 0) for at in range(6)]
    memory.units[21] = 1.0
    memory.lock(5)
    assert len(calls) == 6 and memory.units[21].all() and not memory.units[:21].any()
    part = memory.units[21]
    del memory
    assert len(calls) == 6, "a part is in use"
    del part
    assert sorted(calls[6:]) == [(address,) for address, *_ in sorted(calls[:6])]


def test_a_copy_waits_for_its_piece_and_the_one_behind_it_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, calls = pieces_of(monkeypatch)
    busy, asked, lock = threading.Event(), threading.Event(), stream._lock

    def held(pages: stream.Bytes, device: torch.device) -> bool:
        busy.set()
        return asked.wait(60) and lock(pages, device)

    monkeypatch.setattr(stream, "_lock", held)
    memory.lock_all()
    busy.wait(60)
    copying = threading.Thread(target=memory.lock, args=(4,))
    copying.start()
    while memory._next != 4:
        time.sleep(0.001)
    asked.set()
    copying.join()
    begin = settled(memory).units.data_ptr()
    assert [(address - begin) // 8192 for address, *_ in calls] == [0, 4, 5, 1, 2, 3]


def test_host_memory_that_cannot_be_locked_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    memory, calls = pieces_of(monkeypatch, refused=3)
    memory.lock_all()
    settled(memory).units.fill_(1.0)
    memory.lock(5)
    assert len(calls) == 4 and memory.units.all(), "not tried again, and the present copy stays"
    assert [record.getMessage() for record in caplog.records] == [
        "cannot page-lock 0.00 of 0.00 GiB of host memory: swaps there are slow; reduce --swap-space"
    ]


def test_nan_in_a_history_that_comes_back_is_computed_again() -> None:
    """The past of a chat is poisoned on the host: its next turn fails once, and forgets the copy."""
    driver = make()
    history = [5 + at for at in range(17)]
    want = [make_request("first", history, 3), *(make_request(f"o{i}", [50 + i] * 30, 3) for i in range(3))]
    for request in want:
        driver.add(request)
        driver.run()
    runner = driver.runner
    assert isinstance(runner, Runner) and driver.stats().host_units_cached
    runner.device.pool.host_units.fill_(float("nan"))
    driver.add(make_request("second", history, 3))
    driver.run()
    stats = driver.stats()
    assert stats.prefix_host_hit_tokens == 16 and stats.failed_steps == 1
    assert driver.outputs["second"] == driver.outputs["first"]


def test_nan_that_comes_back_from_the_host_is_computed_again() -> None:
    driver = make()
    requests = requests_of()
    driver.add(*requests)
    runner = driver.runner
    assert isinstance(runner, Runner)
    poisoned = None
    while poisoned is None:
        driver.step()
        poisoned = next((op for op in driver.steps[-1].operations if op.action is CacheAction.SWAP_OUT), None)
    runner.device.pool.host_units[list(poisoned.target.units)] = float("nan")
    driver.run()
    back = [op for step in driver.steps for op in step.operations if op.action is CacheAction.SWAP_IN]
    assert poisoned.target in [op.source for op in back], "a poisoned block never came back"
    for index, request in enumerate(requests):
        assert driver.finals[request.request_id].finish_reason is not FinishReason.ERROR
        assert driver.outputs[request.request_id] == solo(index), "the failed step runs again, from the prompt"
    stats = driver.stats()
    assert (stats.host_units_used - stats.host_units_cached, stats.units_owned) == (0, 0)
