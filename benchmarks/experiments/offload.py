"""One batch with weights and cache on the host, on a simulated device: blocks by kind, mini-batches, steps, costs.

Blocks are dealt out and packed by the engine's own rules (`engine.cache.placement`); the time of a step comes from
`benchmarks.experiments.pipelines`. Knows nothing of a paper's arms or figures.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.experiments.mini_batches import HostBlocks, even_mini_batches, mini_batches
from benchmarks.experiments.pipelines import BLOCK, Compact, Layout, OffloadDevice, Stage, Timeline, run_layers
from engine.cache.placement import HostSplit, OffloadCosts, ideal_act, next_is_act, split_host
from loadgen.simulation.gpu import NOISE

SAMPLES = (16, 32, 64, 128, 256, 512)
"""Blocks at which the costs are measured, `REPEATS` times each."""
REPEATS = 4


class Blocks(NamedTuple):
    """A request's blocks at some moment: on the host, and on the device."""

    host: HostBlocks
    device: int


@dataclass(frozen=True, slots=True)
class Case:
    """An arm under a load on its device, ready to run.

    compact       the stand-in for K and V
    act_resident  whether the cache on the device is ACT, else K and V
    prompts       tokens of every request; each generates `output`
    printed       mini-batches by the paper's rule, else even ones
    """

    device: OffloadDevice
    layout: Layout
    compact: Compact
    act_resident: bool
    prompts: tuple[int, ...]
    output: int
    printed: bool = False

    @property
    def streamed(self) -> float:
        """Bytes of weights that a layer loads."""
        return (1.0 - self.layout.resident) * self.device.layer_bytes

    @property
    def device_blocks(self) -> int:
        """Blocks of cache that fit on the device."""
        size = self.device.layers * self.device.block_bytes
        return int(self.layout.cache_bytes // (size * self.device.ratio if self.act_resident else size))

    @property
    def act_bytes(self) -> float:
        """A block of the compact kind in one layer, over the link."""
        return self.device.block_bytes * self.device.ratio if self.compact == "project" else 0.0

    def blocks(self, split: HostSplit, step: int) -> list[Blocks]:
        """Every request's blocks in decode step `step` (from 1): the device's first, the others by the deficit rule."""
        counts = [-(-(prompt + step) // BLOCK) for prompt in self.prompts]
        table = _held(split, max(counts))
        total = sum(self.prompts)  # of what fits the device, every request has its share, so that they stay alike
        shares = [self.device_blocks * prompt // total for prompt in self.prompts]
        on_device = [min(count, share) for count, share in zip(counts, shares, strict=True)]
        return [Blocks(table[count - held], held) for count, held in zip(counts, on_device, strict=True)]

    def mini_batches(self, blocks: Sequence[Blocks], costs: OffloadCosts) -> list[tuple[int, ...]]:
        """Indices of the requests of each mini-batch. ACT blocks on the device need room to regenerate as well."""
        regenerated = self.compact == "project" and self.act_resident
        asked = [HostBlocks(host.kv, host.act + held * regenerated) for host, held in blocks]
        limit = self.layout.max_blocks
        pack = mini_batches if self.printed else even_mini_batches
        return pack(asked, costs, max_kv=limit, max_act=limit)

    def stage(self, blocks: Sequence[Blocks]) -> Stage:
        """One mini-batch in one layer."""
        device = self.device
        host = [each.host for each in blocks]
        kv, compact = sum(each.kv for each in host), sum(each.act for each in host)
        on_device = sum(each.device for each in blocks)
        hidden = BLOCK * (compact + (on_device if self.act_resident else 0))
        load = device.load_seconds(kv * device.block_bytes + compact * self.act_bytes)
        context = BLOCK * (kv + compact + on_device)
        forward = device.forward_seconds(len(host), context)
        if self.compact == "tokens":
            tokens = [BLOCK * each.act for each in host]
            pairs = sum(count * (count + 1) // 2 for count in tokens)
            return Stage(load, forward + device.recompute_seconds(sum(tokens), pairs))
        if self.compact == "project":
            forward += device.regenerate_seconds(hidden)
        return Stage(load, forward)

    def step(self, split: HostSplit, costs: OffloadCosts, step: int) -> "Step":
        """Decode step `step` without noise."""
        blocks = self.blocks(split, step)
        batches = self.mini_batches(blocks, costs)
        stages = [self.stage([blocks[index] for index in batch]) for batch in batches]
        timeline = run_layers(stages, self.device.layers, self.device.load_seconds(self.streamed))
        kv, act = (sum(counts) for counts in zip(*(each.host for each in blocks), strict=True))
        return Step(timeline, kv, act, sum(each.device for each in blocks), len(batches))

    def prefill_seconds(self, split: HostSplit, tokens: int) -> float:
        """All prompts, in groups of about `tokens` tokens that stream the weights once each and store their blocks."""
        device, seconds = self.device, 0.0
        stored = (split.kv * device.block_bytes + split.act * self.act_bytes) / max(split.kv + split.act, 1) / BLOCK
        for group in _groups(self.prompts, tokens):
            count, pairs = sum(group), sum(prompt * (prompt + 1) // 2 for prompt in group)
            # Blocks go to the host on the link's other direction.
            compute = max(device.recompute_seconds(count, pairs), device.load_seconds(count * stored))
            load = device.load_seconds(self.streamed)
            seconds += run_layers([Stage(0.0, compute)], device.layers, load).seconds
            seconds += device.step_overhead(len(group))
        return seconds


class Step(NamedTuple):
    """A decode step: its pipelines, blocks of the host by kind, blocks on the device, mini-batches."""

    timeline: Timeline
    kv: int
    act: int
    on_device: int
    batches: int


def _held(split: HostSplit, most: int) -> list[HostBlocks]:
    """Blocks of a request on the host with 0 … `most` blocks."""
    found = [HostBlocks(0, 0)]
    for _ in range(most):
        kv, act = found[-1]
        found.append(HostBlocks(kv, act + 1) if next_is_act(kv, act, split) else HostBlocks(kv + 1, act))
    return found


def _groups(prompts: Sequence[int], tokens: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for prompt in prompts:
        if groups[-1] and sum(groups[-1]) + prompt > tokens:
            groups.append([])
        groups[-1].append(prompt)
    return groups


def measure_costs(case: Case, batches: int, noise: random.Random) -> OffloadCosts:
    """Costs of one layer for a batch in so many mini-batches: lines through noisy samples of the device (§4.3)."""
    device = case.device
    rows = max(len(case.prompts) // batches, 1)

    def line(seconds: Callable[[int], float]) -> tuple[float, float]:
        """(at no block, per block); samples count by their relative errors."""
        blocks = np.repeat(np.array(SAMPLES, dtype=np.float64), REPEATS)
        times = np.array([seconds(int(count)) * (1.0 + NOISE * noise.gauss(0.0, 1.0)) for count in blocks])
        points = np.stack([1.0 / times, blocks / times], axis=1)
        fixed, per_block = np.linalg.lstsq(points, np.ones(len(times)), rcond=None)[0]
        return max(float(fixed), 0.0), float(per_block)

    launch, regenerate = line(lambda count: device.regenerate_seconds(BLOCK * count))
    _, load_kv = line(lambda count: device.load_seconds(count * device.block_bytes))
    forward_fixed, forward = line(lambda count: device.forward_seconds(rows, BLOCK * count))
    return OffloadCosts(
        load_weights=device.load_seconds(case.streamed),
        load_kv=load_kv,
        regenerate=regenerate,
        forward_fixed=batches * (forward_fixed + launch),
        forward=forward,
        ratio=device.ratio,
    )


def split_context(costs: OffloadCosts, blocks: int, act_device: int) -> HostSplit:
    """The closed form for a host that holds just `blocks` blocks: the room that they fill depends on their kinds."""
    low, high = costs.ratio * blocks, float(blocks)
    for _ in range(60):
        room = (low + high) / 2
        if room + (1.0 - costs.ratio) * ideal_act(costs, room, act_device) < blocks:
            low = room
        else:
            high = room
    return split_host(costs, round(high), act_device)


def algorithm_1(costs: OffloadCosts, room: int, act_device: int) -> HostSplit:
    """The paper's Algorithm 1 for a host of `room` KV blocks."""
    budget = costs.load_weights - costs.regenerate * act_device
    act = min(max(budget, 0.0) / costs.regenerate, room / costs.ratio)
    kv = min(max(-budget, 0.0) / costs.load_kv, room)
    remaining = max(0.0, room - costs.ratio * act - kv)
    act += remaining / (costs.ratio + costs.regenerate / costs.load_kv)
    return HostSplit(round(room - costs.ratio * act), round(act))
