"""Swaps through the host tier: both ways beside a pinned copy of the same size, and their cost for steps beside."""

from collections.abc import Iterator

from benchmarks.gpu.limits import measure_limits
from benchmarks.gpu.loop import make_runner, scheduler_config
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.steps import Shape, time_shape
from benchmarks.gpu.table import Row
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.scheduling.output import SchedulerOutput


def swaps(action: CacheAction, first_unit: int, first_host_unit: int, num_blocks: int) -> tuple[CacheOperation, ...]:
    """Blocks of KV one after the other, on the device from `first_unit` and on the host from `first_host_unit`."""
    operations = []
    for block in range(num_blocks):
        device = CacheEntry(CacheKind.KV, Tier.DEVICE, (first_unit + 2 * block, first_unit + 2 * block + 1))
        host = CacheEntry(CacheKind.KV, Tier.HOST, (first_host_unit + 2 * block, first_host_unit + 2 * block + 1))
        pair = (device, host) if action is CacheAction.SWAP_OUT else (host, device)
        operations.append(CacheOperation(action, *pair))
    return tuple(operations)


def check_swap(setup: Setup) -> Iterator[Row]:
    limits = measure_limits(setup)
    spec = setup.spec("8B")  # a unit of 16 tokens takes 1 MiB
    blocks, few = setup.size(256, 4), setup.size(8, 1)
    shape = Shape(setup.size(64, 3), setup.size(2048, 40))
    config = scheduler_config(shape.decodes, setup.size(512, 32), shape.length, shape.num_blocks + blocks)
    runner = make_runner(setup, spec, setup.weights(spec), config, host_units=2 * blocks)
    first = 2 * shape.num_blocks
    unit_bytes = spec.kv_bytes_per_token(setup.dtype.itemsize) * config.block_size / 2
    for action, way in ((CacheAction.SWAP_OUT, "out"), (CacheAction.SWAP_IN, "in")):
        step = SchedulerOutput(0, (), operations=swaps(action, first, 0, blocks))
        seconds = setup.seconds(lambda step=step: runner.launch(step)(), repeats=4)  # type: ignore[misc]
        rate = 2 * blocks * unit_bytes / seconds / 1e9
        note = f"units of {unit_bytes / 2**20:.2g} MiB"
        pinned = limits.to_host / 1e9
        yield Row(f"swap {way}, {2 * blocks} units", "GB/s", rate, 0.85 * pinned, pinned, "~50 (H100)", note=note)
    runs = setup.size(30, 2)
    plain = time_shape(setup, runner, shape, runs)
    both = swaps(CacheAction.SWAP_OUT, first, 0, few) + swaps(CacheAction.SWAP_IN, first + 2 * few, 2 * few, few)
    beside = time_shape(setup, runner, shape, runs, both)
    name = f"decode step B{shape.decodes} c{shape.context} beside {2 * few} blocks of swaps, over the same without"
    yield Row(name, "x", beside.step / plain.step, 1.05, 1.0, lower=True, note=f"{plain.step * 1e3:.3g} ms without")
