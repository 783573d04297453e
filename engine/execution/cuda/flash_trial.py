"""Whether prompts' chunks attend by FlashAttention-3: where it gives what our kernel gives, in a graph, and sooner.

Tried once, at the start, over a prompt of random numbers in the first units of the pool, which nobody has yet.
"""

import logging
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from engine.execution.cuda.buffers import HeadSizes, StepBuffers, send
from engine.execution.cuda.flash import FlashPrefill, load, refusal
from engine.execution.cuda.forward import Forward
from engine.execution.cuda.shapes import Buckets
from engine.execution.cuda.tables import DeviceTables
from engine.execution.layout import decodes_first
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.spec import ModelSpec
from predictor.limits import UNITS_PER_BLOCK, Limits

log = logging.getLogger("tidemill.engine")

_TOKENS, _FEWEST = 2048, 128
_TOLERANCE = 2e-2  # of the largest number, of which bfloat16 keeps eight bits
_RUNS = 10
Attend = Callable[[Tensor], None]
"""Writes what the trial's queries gather to a tensor."""


def choose(
    spec: ModelSpec, limits: Limits, pool: UnitPool, rows: RowTable, tables: DeviceTables, forward: Forward,
    buffers: StepBuffers,
) -> FlashPrefill | None:  # fmt: skip
    """What prompts' chunks attend by, None: our kernel. On the lane of the steps, before any."""
    if (reason := refusal(pool, HeadSizes.of(spec), spec.softcap or 0.0)) is not None:
        log.debug("%s", reason)
        return None
    tokens = min(_TOKENS, limits.max_num_batched_tokens, limits.max_model_len)
    tokens = min(tokens, limits.num_units // UNITS_PER_BLOCK * limits.block_size)
    if tokens < _FEWEST:
        return None
    try:
        found = FlashPrefill(load(), forward.cells, tables.pair, limits.max_model_len)
    except Exception as error:  # of a build for another torch, of a library that is missing: none of them is ours
        log.warning("prompts attend by our kernel: FlashAttention-3 does not load: %s", str(error).strip()[:200])
        return None
    reason = _tried(found, spec, tokens, pool, rows, tables, forward, buffers)
    log.info("prompts attend by %s", f"our kernel, not FlashAttention-3: {reason}" if reason else "FlashAttention-3")
    return None if reason else found


def _tried(
    found: FlashPrefill, spec: ModelSpec, tokens: int, pool: UnitPool, rows: RowTable, tables: DeviceTables,
    forward: Forward, buffers: StepBuffers,
) -> str | None:  # fmt: skip
    """What a prompt of so many tokens has against it."""
    blocks, keys = -(-tokens // pool.block_size), tables.tables[0]
    shape = Buckets(rows.num_rows, tokens).exact(tokens, 0)
    inputs = buffers.fill(shape, decodes_first(np.array([[0, 0, tokens, 0]])), rows)
    buffers.upload()
    units = pool.units[: UNITS_PER_BLOCK * blocks]
    try:
        units.normal_()
        entries = np.arange(blocks, dtype=np.int32) * UNITS_PER_BLOCK * pool.num_layers
        keys[0, :blocks].copy_(send(entries, pool.device))
        q = torch.randn((tokens, spec.num_heads, spec.head_dim), dtype=pool.dtype, device=pool.device)
        found.begin(inputs.prefill.chunks, keys)
        ours, theirs = (partial(forward.prefill, 0, q, inputs, flash) for flash in (None, found))
        return compare(ours, theirs, torch.empty_like(q))
    finally:
        units.zero_()
        keys.zero_()


def compare(ours: Attend, theirs: Attend, out: Tensor) -> str | None:
    """What is against the second way of writing `out`: another result, no graph, or as much time."""
    try:
        results = []
        for attend in (ours, theirs):
            out.fill_(float("nan"))
            attend(out)
            results.append(out.to(torch.float32, copy=True))
        most, apart = results[0].abs().max(), (results[0] - results[1]).abs().max()
        if not bool(apart <= _TOLERANCE * most):  # nor where either is NaN
            return f"the other is {float(apart / most):.1%} off"
        mine, its = (_seconds(attend, out) for attend in (ours, theirs))
    except (RuntimeError, TypeError) as error:  # TypeError: of an older torch, whose function takes less
        return f"the other does not run: {str(error).strip()[:200]}"
    return None if its < mine else f"the other takes {its / mine:.2f} of its time"


def _seconds(attend: Attend, out: Tensor) -> float:
    """As steps run it: from a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(out)
    taken = []
    for _ in range(_RUNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(float(begin.elapsed_time(end)))
    return median(taken[1:])  # the first one sends the graph to the device
