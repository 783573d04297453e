"""Memory that goes from addresses to addresses, over a driver that lets no rule be broken and fails when it is told."""

import ctypes
import gc
from collections.abc import Callable
from ctypes import byref, c_uint64
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda_driver import INVALID_VALUE, OUT_OF_MEMORY, FakeDriver, RuleBrokenError, fake_memory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fuzz import machine_test

from engine.execution.cuda import mapped_layers
from engine.execution.cuda.mapped_layers import (
    Access,
    Location,
    MappingError,
    Memory,
    Piece,
    Properties,
    Range,
    refusal,
    tensor_over,
)

GRAIN = 4096


def failing(name: str, at: int, code: int = INVALID_VALUE) -> Callable[[str], int]:
    """The call of this name, counted from 0, fails, once."""
    calls = count()
    return lambda called: code if called == name and next(calls) == at else 0


def mark(found: Range, piece: int, value: int) -> None:
    """Write a value all over a piece of a range."""
    first = sum(each.num_bytes for each in found.pieces[:piece])
    found.tensor[first : first + found.pieces[piece].num_bytes] = value


def values(found: Range) -> list[int]:
    """What each piece holds, of one value each."""
    at, held = 0, []
    for piece in found.pieces:
        part = found.tensor[at : at + piece.num_bytes]
        (value,) = part.unique().tolist()
        held.append(value)
        at += piece.num_bytes
    return held


def test_the_structures_are_as_large_as_the_driver_has_them() -> None:
    assert [ctypes.sizeof(each) for each in (Location, Properties, Access)] == [8, 32, 12]


@pytest.mark.parametrize(("name", "at"), [("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)])
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, 719])
def test_what_the_driver_refuses_changes_nothing(name: str, at: int, code: int) -> None:
    memory, driver = fake_memory()
    found, pieces = memory.reserve(4 * GRAIN), [memory.create(GRAIN) for _ in range(4)]
    found.push(pieces[:1])
    mark(found, 0, 5)
    driver.fail = failing(name, at, code)
    expected = driver_name(code)
    with pytest.raises(MappingError, match=f"{name} failed: {expected}"):
        found.push(pieces[1:])
    assert values(found) == [5] and len(driver.mapped) == 1
    assert [piece.range for piece in pieces] == [found, None, None, None]
    found.push(pieces[1:])
    assert found.backed == 4 * GRAIN
    driver.fail = failing("cuMemUnmap", 0, code)
    with pytest.raises(MappingError, match=f"cuMemUnmap failed: {expected}"):
        found.pop()
    assert found.backed == 4 * GRAIN and found.pop() is pieces[3]


def driver_name(code: int) -> str:
    return {OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY", INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE"}.get(
        code, f"error {code}"
    )


def test_what_torch_holds_without_need_is_asked_for_before_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, driver = fake_memory(capacity=2 * GRAIN)
    memory.create(GRAIN)

    def empty_cache() -> None:
        driver.capacity = 3 * GRAIN

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    memory.create(2 * GRAIN)
    with pytest.raises(MappingError, match="OUT_OF_MEMORY") as raised:
        memory.create(GRAIN)
    assert raised.value.no_room
    driver.fail = failing("cuMemCreate", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("that was not why"))
    with pytest.raises(MappingError, match="INVALID_VALUE"):
        memory.create(GRAIN)


def test_why_a_machine_cannot_is_said() -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert refusal(0, FakeDriver) is None
    assert "libcuda" in str(refusal(0, missing))
    assert "does not support virtual memory" in str(refusal(0, lambda: FakeDriver(supported=0)))
    broken = FakeDriver()
    broken.fail = failing("cuInit", 0, 100)
    assert refusal(0, lambda: broken) is not None


def test_every_call_of_the_library_has_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them ctypes cuts addresses to 32 bits."""
    for lacks, refused in (("", False), ("cuMemMap", True)):
        known = [name for name in mapped_layers._CALLS if name != lacks]
        library = SimpleNamespace(**{name: SimpleNamespace() for name in known})
        monkeypatch.setattr(ctypes, "CDLL", lambda _name, library=library: library)
        if refused:
            assert "cuMemMap" in str(refusal(0))
            continue
        assert mapped_layers.load_driver() is library
        assert library.cuMemUnmap.argtypes == (c_uint64, ctypes.c_size_t)
        assert all(each.restype is ctypes.c_int and each.argtypes for each in vars(library).values())


def test_a_tensor_outlives_all_but_its_memory() -> None:
    buffer = (ctypes.c_uint8 * 100)(*range(100))
    tensor = tensor_over(ctypes.addressof(buffer), 100, torch.device("cpu"))
    assert tensor.dtype == torch.uint8 and tensor.tolist() == list(range(100))
    part = tensor[8:16].view(torch.int32)
    del tensor
    gc.collect()
    part.fill_(-1)
    assert list(buffer[7:17]) == [7, *[255] * 8, 16]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda d, m, r: d.cuMemMap(r.base + 8, GRAIN, 0, r.pieces[0].handle, 0),
        lambda d, m, r: d.cuMemMap(r.base, GRAIN, 0, m.create(GRAIN).handle, 0),
        lambda d, m, r: d.cuMemMap(r.base + GRAIN, 2 * GRAIN, 0, m.create(GRAIN).handle, 0),
        lambda d, m, r: d.cuMemMap(r.base + GRAIN, GRAIN, 0, r.pieces[0].handle, 0),
        lambda d, m, r: d.cuMemMap(r.base + 2 * GRAIN, GRAIN, 0, m.create(GRAIN).handle, 0),
        lambda d, m, r: m.allow(r.base, 2 * GRAIN),
        lambda d, m, r: d.cuMemUnmap(r.base, 2 * GRAIN),
        lambda d, m, r: d.cuMemUnmap(r.base + GRAIN, GRAIN),
        lambda d, m, r: d.cuMemRelease(r.pieces[0].handle),
        lambda d, m, r: d.cuMemAddressFree(r.base, 2 * GRAIN),
        lambda d, m, r: d.cuMemAddressReserve(byref(c_uint64()), 100, 0, 0, 0),
        lambda d, m, r: (setattr(d, "busy", True), r.pop()),
    ],
)
def test_the_fake_driver_keeps_the_rules(misuse: Callable[[FakeDriver, Memory, Range], object]) -> None:
    memory, driver = fake_memory()
    found = memory.reserve(2 * GRAIN)
    found.push([memory.create(GRAIN)])
    with pytest.raises(RuleBrokenError):
        misuse(driver, memory, found)


class Moves(RuleBasedStateMachine):
    """Pieces go from range to range, with calls that fail, against lists of values."""

    @initialize()
    def begin(self) -> None:
        self.memory, self.driver = fake_memory(capacity=40 * GRAIN)
        self.ranges: list[tuple[Range, list[int]]] = []
        self.loose: list[tuple[Piece, int]] = []
        self.numbers = count(1)

    @rule(size=st.integers(1, 12 * GRAIN))
    def reserve(self, size: int) -> None:
        self.ranges.append((self.memory.reserve(size), []))

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), size=st.integers(1, 3 * GRAIN))
    def create(self, data: st.DataObject, size: int) -> None:
        found, held = data.draw(st.sampled_from(self.ranges))
        try:
            piece = self.memory.create(size)
        except MappingError as error:
            assert error.no_room
            return
        if found.backed + piece.num_bytes > found.num_bytes:
            self.loose.append((piece, 0))
            return
        found.push([piece])
        held.append(next(self.numbers) % 200)
        mark(found, len(held) - 1, held[-1])

    @precondition(lambda self: any(held for _, held in self.ranges))
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        found, held = data.draw(st.sampled_from([each for each in self.ranges if each[1]]))
        self.loose.append((found.pop(), held.pop()))

    @precondition(lambda self: self.loose and self.ranges)
    @rule(data=st.data(), fail=st.sampled_from(["", "cuMemMap", "cuMemSetAccess"]), at=st.integers(0, 3))
    def push(self, data: st.DataObject, fail: str, at: int) -> None:
        found, held = data.draw(st.sampled_from(self.ranges))
        order = data.draw(st.permutations(self.loose))
        room, taken = found.num_bytes - found.backed, []
        for piece, value in order[: data.draw(st.integers(1, len(order)))]:
            if piece.num_bytes <= room:
                taken.append((piece, value))
                room -= piece.num_bytes
        self.driver.fail = failing(fail, at)
        try:
            found.push([piece for piece, _ in taken])
        except MappingError:
            return
        finally:
            self.driver.fail = lambda _name: 0
        held += [value for _, value in taken]
        self.loose = [each for each in self.loose if each not in taken]

    @precondition(lambda self: any(held for _, held in self.ranges))
    @rule(data=st.data())
    def cannot_pop(self, data: st.DataObject) -> None:
        found, _ = data.draw(st.sampled_from([each for each in self.ranges if each[1]]))
        self.driver.fail = failing("cuMemUnmap", 0)
        with pytest.raises(MappingError):
            found.pop()
        self.driver.fail = lambda _name: 0

    @invariant()
    def all_is_where_it_was_put(self) -> None:
        for found, held in getattr(self, "ranges", []):
            assert values(found) == held and all(piece.range is found for piece in found.pieces)
        if hasattr(self, "loose"):
            assert all(piece.range is None for piece, _ in self.loose)
            assert len(self.driver.mapped) == sum(len(held) for _, held in self.ranges)
            assert self.driver.allowed == set(self.driver.mapped)


TestMoves = machine_test(Moves, 60, 30)
