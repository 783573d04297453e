"""Layers of the GPU's runner are given up and come back in any order, while the driver refuses one call or another:
what units hold stays, no memory is lost, and a restore that ends gives the tokens of an engine that gave up none."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from fake_cuda_driver import INVALID_VALUE, FakeDriver, fake_memory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fuzz import machine_test
from test_stages import LAYERS, UNITS, llama, make, step_of

from engine.errors import ConfigError
from engine.execution.cuda import mapped_layers
from engine.execution.cuda.mapped_layers import MappedLayers, MappingError
from engine.execution.pool import UnitPool
from engine.execution.stages import PipelineRunner
from engine.models.linear import make_linear
from engine.models.weights import DummyTensors, build_weights, matrices

CALLS = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")
PROMPTS = ([5, 6, 7], [8, 9])


def parts(runner: PipelineRunner) -> tuple[MappedLayers, UnitPool, FakeDriver]:
    layers = runner._layers
    assert isinstance(layers, MappedLayers)
    driver: FakeDriver = layers._memory._driver
    return layers, runner._device.pool, driver


def failing(name: str, after: int) -> Callable[[str], int]:
    """Every call of this name fails from one on."""
    calls = count()
    return lambda called: INVALID_VALUE if called == name and next(calls) >= after else 0


def addresses(layers: MappedLayers) -> list[int]:
    return [matrix.data().data_ptr() for layer in layers for matrix in matrices(layer)]


def most(runner: PipelineRunner, keep: range) -> int:
    """Return the units of the layers in `keep` for which there is memory, when all others are given up."""
    layers, _, _ = parts(runner)
    kept = sum(layers._pieces[index].num_bytes for index in keep)
    every = sum(layers._memory._driver.memory.values())
    return (every - kept) // (len(keep) * runner.unit_layer_bytes) - 1


def test_memory_moves_and_addresses_stay() -> None:
    runner = make(llama(), "cuda")
    layers, pool, driver = parts(runner)
    before, taken = addresses(layers), driver.counts["cuMemCreate"]
    assert taken == LAYERS + 1 and pool.slices.data_ptr() == layers.tensor.data_ptr()
    whole, room = runner.launch(step_of(*PROMPTS))().token_ids, most(runner, range(2)) + 1
    runner.drop(range(2), room - 1)
    assert layers._pool is not None and [piece.range for piece in layers._pieces[2:]] == [layers._pool] * 2
    pool.put_past(np.array([room - 2]), range(2), torch.ones(1, 2, pool.slices.shape[1]))
    runner.restore(UNITS)
    assert addresses(layers) == before and driver.counts["cuMemCreate"] == taken and not driver.counts["cuMemRelease"]
    assert runner.launch(step_of(*PROMPTS))().token_ids == whole
    with pytest.raises(ValueError, match="but can have only"):
        runner.drop(range(2), room)
    assert not layers.absent and addresses(layers) == before, "nothing has changed"


def test_what_was_loaded_beside_steps_is_not_taken_for_loaded_behind_another_drop() -> None:
    runner = make(llama(), "cuda")
    layers, pool, _ = parts(runner)
    whole = runner.launch(step_of(*PROMPTS))().token_ids
    runner.drop(range(2), UNITS)
    runner.prepare_restore(UNITS)
    assert all(piece.range is home for piece, home in zip(layers._pieces, layers._homes, strict=True))
    runner.drop(range(1), 5 * UNITS)
    pool.put_past(np.arange(5 * UNITS), range(1), torch.full((5 * UNITS, 1, pool.slices.shape[1]), torch.nan))
    runner.restore(UNITS)
    assert runner.launch(step_of(*PROMPTS))().token_ids == whole


def test_memory_is_not_moved_under_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that stands for CUDA's refuses to unmap what something launched may touch."""
    runner = make(llama(), "cuda")
    layers, pool, driver = parts(runner)
    monkeypatch.setattr(mapped_layers.configs, "is_cuda", lambda device: device is layers._memory.device)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.rest)
    for move in (
        lambda: layers.give_up([2, 3], 0),
        lambda: layers.give_back(0),
        lambda: layers.refill(2, layers._whole[2]),
    ):
        driver.busy = True
        move()
        assert not driver.busy
    assert layers.absent == [2, 3]
    assert pool.layers == range(LAYERS)


def test_a_start_without_memory_says_for_what() -> None:
    spec = llama()
    source = DummyTensors(3, torch.float32, torch.device("cpu"))
    memory, _ = fake_memory(capacity=2**17)
    with pytest.raises(ConfigError, match=r"no memory for the weights of layer 1: .*OUT_OF_MEMORY"):
        build_weights(spec, source, make_linear, lambda layers: MappedLayers(memory, layers))
    memory, driver = fake_memory()
    weights = build_weights(spec, source, make_linear, lambda layers: MappedLayers(memory, layers))
    assert isinstance(weights.layers, MappedLayers)
    driver.capacity = sum(driver.memory.values())
    with pytest.raises(ConfigError, match=r"no memory for a cache of 0.00 GiB: .*OUT_OF_MEMORY"):
        weights.layers.reserve(4096, 4096)


class Drops(RuleBasedStateMachine):
    """`past`: by unit and layer, the value written there, which must stay; None: the runner must be restored first."""

    @initialize()
    def begin(self) -> None:
        self.runner = make(llama(), "cuda")
        self.layers, self.pool, self.driver = parts(self.runner)
        self.whole = self.runner.launch(step_of(*PROMPTS))().token_ids
        self.total = sum(self.driver.memory.values())
        self.past: dict[tuple[int, int], float] = {}
        self.broken = False
        self.numbers = count(1)

    def attempt(self, work: Callable[[], object], fail: str, after: int) -> bool:
        self.driver.fail = failing(fail, after)
        try:
            work()
        except MappingError:
            self.past, self.broken = {}, True
            return False
        finally:
            self.driver.fail = lambda _name: 0
        return True

    def forget_but(self, layers: range, units: int) -> None:
        self.past = {key: value for key, value in self.past.items() if key[0] < units and key[1] in layers}

    fails = st.sampled_from(["", "", *CALLS])

    @precondition(lambda self: not self.broken)
    @rule(data=st.data(), fail=fails, after=st.integers(0, 4))
    def drop(self, data: st.DataObject, fail: str, after: int) -> None:
        here = [index for index in range(LAYERS) if index not in self.layers.absent]
        first = data.draw(st.sampled_from(here))
        keep = range(first, data.draw(st.integers(first + 1, here[-1] + 1)))
        units = data.draw(st.integers(1, most(self.runner, keep)))
        if self.attempt(lambda: self.runner.drop(keep, units), fail, after):
            self.forget_but(keep, units)

    @precondition(lambda self: not self.broken and self.layers.absent)
    @rule()
    def too_much(self) -> None:
        with pytest.raises(ValueError, match="but can have only"):
            self.runner.drop(self.pool.layers, most(self.runner, self.pool.layers) + 1)

    @precondition(lambda self: not self.broken)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        unit = data.draw(st.integers(0, self.pool.num_units - 1))
        layer, value = data.draw(st.sampled_from(list(self.pool.layers))), float(next(self.numbers))
        self.pool.put_past(np.array([unit]), range(layer, layer + 1), torch.full((self.pool.slices.shape[1],), value))
        self.past[unit, layer] = value

    @rule(fail=fails, after=st.integers(0, 4))
    def restore(self, fail: str, after: int) -> None:
        if self.attempt(lambda: self.runner.restore(UNITS), fail, after):
            self.broken = False
            self.forget_but(range(LAYERS), UNITS)

    @precondition(lambda self: not self.broken and self.layers.absent)
    @rule(fail=fails, after=st.integers(0, 4))
    def prepare_and_restore(self, fail: str, after: int) -> None:
        units = min(UNITS, self.pool.num_units)
        self.forget_but(self.pool.layers, units)
        if self.attempt(lambda: self.runner.prepare_restore(units), fail, after):
            self.check_past()
            self.runner.restore(UNITS)

    @precondition(lambda self: not self.broken and not self.layers.absent)
    @rule()
    def run(self) -> None:
        self.past = {key: value for key, value in self.past.items() if key[0] >= 24}  # those the step is in
        assert self.runner.launch(step_of(*PROMPTS))().token_ids == self.whole

    def check_past(self) -> None:
        for (unit, layer), value in self.past.items():
            assert (self.pool.past(np.array([unit]), range(layer, layer + 1)) == value).all()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "runner"):
            return
        assert sum(self.driver.memory.values()) == self.total
        homes = zip(self.layers._pieces, self.layers._homes, strict=True)
        for index, (piece, home) in enumerate(homes):
            assert piece.range in (home, self.layers._pool, *([None] if self.broken else []))
            assert self.broken or index in self.layers.absent or piece.range is home
        if not self.broken:
            assert self.pool.bytes_of(self.pool.layers, self.pool.num_units) <= self.layers._pool.backed  # type: ignore[union-attr]
            assert not self.pool.units[self.pool.zero_unit].any()
            self.check_past()


TestDrops = pytest.mark.slow(machine_test(Drops, 25, 25))
