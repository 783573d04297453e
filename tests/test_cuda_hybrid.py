"""The hybrid cache on the CUDA runner, with the kernels' twins: what lies where changes no token and no logit."""

import functools
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_engine import make_driver
from devices import pool_of
from driver import make_request
from hand_driver import BLOCK, CPU
from test_families import HYBRID_RUNS, check_hybrid, decoder_of
from test_hybrid_cache import bare_runner, hidden, kv, start

from engine.cache.blocks import CacheAction, CacheOperation
from engine.execution.cuda import swap
from engine.execution.cuda.buffers import StepInputs
from engine.execution.cuda.forward import Graphs
from engine.execution.cuda.swap import Swapper
from engine.execution.pool import UnitPool
from engine.execution.stream import DeviceStream, Mark
from engine.models.spec import hidden_state_refusal
from engine.scheduling.output import Chunk, ReplacedEntry, SchedulerOutput
from engine.triton_kernels import twins


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "policy", "depth"), [(case, policy, 1 - depth) for case, policy, depth in HYBRID_RUNS]
)
def test_tokens_of_the_whole_engine_equal_transformers(
    case: str, policy: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps launched ahead of the tokens they are built on. Steps without hidden state replay graphs."""
    replayed, original = 0, Graphs.run

    def counted(self: Graphs, inputs: StepInputs, *, adapted: bool = False) -> None:
        nonlocal replayed
        replayed += 1
        original(self, inputs, adapted=adapted)

    monkeypatch.setattr(Graphs, "run", counted)
    decoder = decoder_of(case)
    scratch = 0 if hidden_state_refusal(decoder.spec) else 12
    driver = make_driver(
        decoder.spec, decoder.weights, depth=depth, num_blocks=30, seqs=8, tokens=24, host_units=70,
        scratch_blocks=scratch, policy=policy,
    )  # fmt: skip
    check_hybrid(driver, case)
    assert driver.most_in_flight == 1 + depth
    computed = sum(bool(step.chunks) for step in driver.steps)
    from_hidden = sum(step.features.compact_tokens > 0 for step in driver.steps)
    assert replayed <= computed - from_hidden if scratch else replayed == computed


@functools.cache
def expected_tokens(name: str = "llama2", count: int = 3) -> list[int]:
    """From KV, in one place."""
    runner = bare_runner("cuda", name)
    tokens = [start(runner, kv(0, 1, 2, 3))]
    for step in range(1, count):
        tokens += runner.launch(SchedulerOutput(step, (Chunk(1, 5 + step, 1, True),)))().token_ids
    return tokens


def test_the_last_block_may_reach_beyond_the_longest_context() -> None:
    runner = bare_runner("cuda", max_model_len=7)
    first = start(runner, hidden(0, 1))
    operations = tuple(
        CacheOperation(CacheAction.RESTORE, source, target, start)
        for source, target, start in zip(hidden(0, 1), kv(2, 3, 4, 5), (0, BLOCK), strict=True)
    )
    replaced = tuple(ReplacedEntry(1, block, entry) for block, entry in enumerate(kv(2, 3, 4, 5)))
    output = SchedulerOutput(1, (Chunk(1, 6, 1, True),), replaced=replaced, operations=operations)
    assert [first, *runner.launch(output)().token_ids] == expected_tokens()[:2]


# --- transfers beside the steps ----------------------------------------------------------------------------------


class LaterMark:
    """A place in a lane's queue."""

    def __init__(self, lane: "LaterLane") -> None:
        self.lane, self.count = lane, lane.enqueued

    @property
    def passed(self) -> bool:
        return self.lane.done >= self.count

    def reach(self) -> None:
        """Run what leads here, and nothing else."""
        while not self.passed:
            first = self.lane.queue[0]
            if isinstance(first, LaterMark):
                first.reach()
            self.lane.advance()

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait on the host")


class LaterLane(DeviceStream):
    """Runs nothing until it is told to, as a stream may."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queue: deque[Callable[[], object] | LaterMark] = deque()
        self.enqueued = self.done = 0

    def put(self, task: Callable[[], object] | LaterMark) -> None:
        self.queue.append(task)
        self.enqueued += 1

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.put(lambda: target.copy_(source))

    def wait(self, mark: object) -> None:
        if isinstance(mark, LaterMark):  # others are of a lane that runs at once
            self.put(mark)

    def mark(self) -> LaterMark:
        return LaterMark(self)

    @property
    def is_ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], LaterMark) or self.queue[0].passed)

    def advance(self) -> None:
        task = self.queue.popleft()
        if not isinstance(task, LaterMark):
            task()
        self.done += 1


class StepLane(DeviceStream):
    """Runs at once, so that it waits for its inputs from lanes that do not, which run as far as they like before."""

    def __init__(self, others: list[LaterLane], rng: random.Random, hurry: float) -> None:
        super().__init__(CPU)
        self._others, self._rng, self._hurry = others, rng, hurry

    def mark(self) -> Mark:
        for lane in self._others:
            while lane.is_ready and self._rng.random() < self._hurry:
                lane.advance()
        return super().mark()

    def wait(self, mark: object) -> None:
        if isinstance(mark, LaterMark):
            mark.reach()


class LaterKernels:
    def __init__(self, lane: LaterLane) -> None:
        self._lane = lane

    def unit_copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        self._lane.put(lambda: twins.unit_copy(source, target, pairs))


@pytest.mark.parametrize("hurry", [0.0, 0.5, 1.0])
def test_swaps_hold_their_order_however_the_lanes_run(hurry: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random swaps and writes of a step, in three lanes of any speed, end as they do one after the other. Marks are
    kept of two transfers at least."""
    monkeypatch.setattr(swap, "STAGING_BYTES", 4 * 2 * 8 * 4)  # two units in each half
    for seed in range(40):
        monkeypatch.setattr(swap, "_MOST_MARKS", 2 if seed % 2 else 64)
        rng = random.Random(seed)
        pool = pool_of(8, 1, 4, 1, 2, host_units=8)
        lane, *ways = lanes = [LaterLane() for _ in range(3)]
        rng.shuffle(lanes)  # which requests are in a hurry
        swapper = Swapper(pool, LaterKernels(lane), lane, *ways)
        device, on_host = [0.0] * 8, [0.0] * 8
        for step in range(1, 30):
            count = rng.randint(1, 5)
            sources, targets = rng.sample(range(8), count), rng.sample(range(8), count)
            pairs = np.array([sources, targets]).T
            move = rng.choice(["out", "in", "write"])
            if move == "out":
                swapper.swap_out(pairs)
                values = [device[source] for source in sources]
                for target, value in zip(targets, values, strict=True):
                    on_host[target] = value
            elif move == "in":
                swapper.swap_in(pairs)
                for source, target in zip(sources, targets, strict=True):
                    device[target] = on_host[source]
            else:
                lane.put(functools.partial(pool.units[sources[0]].fill_, float(step)))
                device[sources[0]] = float(step)
            while rng.random() < 0.8 and (ready := [each for each in lanes if each.is_ready]):
                (ready[-1] if rng.random() < hurry else ready[0]).advance()
        while any(each.queue for each in lanes):
            ready = [each for each in lanes if each.is_ready]
            assert ready, "the lanes wait for each other"
            (ready[-1] if rng.random() < hurry else ready[0]).advance()
        assert pool.units[:8, 0].tolist() == device
        assert pool.host_units[:, 0].tolist() == on_host


def swapper_of(*ways: LaterLane) -> tuple[UnitPool, Swapper]:
    pool = pool_of(8, 1, 4, 1, 2, host_units=8)
    return pool, Swapper(pool, twins, StepLane([], random.Random(0), 0.0), *ways)


def test_what_comes_back_does_not_stand_behind_what_goes() -> None:
    """Of other units: nothing that goes out has moved yet when this has come."""
    out, back = LaterLane(), LaterLane()
    pool, swapper = swapper_of(out, back)
    pool.host_units[7] = 3.0
    swapper.swap_out(np.array([[0, 0], [1, 1]]))
    swapper.swap_in(np.array([[7, 5]]))
    assert out.done == 0 and len(out.queue) > 0 and (pool.units[5] == 3.0).all()


def test_staging_is_bounded_and_there_only_with_a_host_tier() -> None:
    assert swap.staging_units(0, 2**20) == 0
    assert swap.staging_units(3, 2**20) == 12
    assert swap.staging_units(1000, 2**20) == 64
    assert swap.staging_units(1000, 2**30) == 4


@pytest.mark.slow
@pytest.mark.parametrize("hurry", [None, 0.0, 0.4, 0.9], ids=["at once", "last", "slow", "fast"])
def test_long_requests_go_out_and_come_back_by_preemption(hurry: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """First come, first served, without hidden state: the host tier alone, as with --swap-space. Tokens are the same
    at any speed of the two lanes of transfers, and no step waits for one on the host."""
    ways = [LaterLane(), LaterLane()]
    if hurry is not None:
        lanes = iter([StepLane(ways, random.Random(1), hurry), *ways])
        monkeypatch.setattr("engine.execution.cuda.device.DeviceStream", lambda _device: next(lanes))
        monkeypatch.setattr(swap, "STAGING_BYTES", 1)  # a unit in each half
    decoder = decoder_of("llama-gqa2")
    driver = make_driver(decoder.spec, decoder.weights, num_blocks=24, seqs=6, tokens=24, host_units=80)
    requests = [make_request(f"r{i}", [3 + i, 5, 7 * i % 50, 11] * 4, 24) for i in range(6)]
    monkeypatch.undo()
    driver.add(*requests)
    driver.run()
    met = {operation.action for step in driver.steps for operation in step.operations}
    assert met == {CacheAction.SWAP_OUT, CacheAction.SWAP_IN}
    assert [way.done > 0 for way in ways] == [hurry is not None] * 2, "each way in a lane of its own"
    for request in requests:
        alone = make_driver(decoder.spec, decoder.weights, depth=0, num_blocks=100)
        alone.add(request)
        alone.run()
        assert driver.outputs[request.request_id] == alone.outputs[request.request_id]
