"""Steps of the 8B shape with linear layers on floats of 8 bits, beside the same steps in bfloat16 in one process."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.loop import make_runner, scheduler_config
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.steps import Shape, Timing, time_shape
from benchmarks.gpu.table import Row
from engine.execution.cuda.backend import float8_layers
from engine.models.compact import make_float8
from engine.models.linear import MakeLinear, make_linear
from engine.models.weights import DummyTensors, build_weights

_OF_DECODE, _OF_PREFILL = 0.65, 1.3
"""What 8 bits should take of a decode step's time, and how many times as fast a prefill should be."""


def check_float8(setup: Setup) -> Iterator[Row]:
    decode = Shape(setup.size(64, 3), setup.size(2048, 40))
    prefill = Shape(0, 1, setup.size(8192, 48))
    make_rounded = float8_layers() if setup.device.type == "cuda" else make_float8
    plain, rounded = (_timings(setup, make, decode, prefill) for make in (make_linear, make_rounded))
    ratio = rounded[0].step / plain[0].step
    name = f"8B decode step, B{decode.decodes} c{decode.context}, fp8 over bf16"
    yield Row(name, "x", ratio, _OF_DECODE, lower=True, note=_note(rounded[0], plain[0]))
    ratio = plain[1].step / rounded[1].step
    yield Row(
        f"8B prefill, chunk of {prefill.chunk}, fp8",
        "x bf16",
        ratio,
        _OF_PREFILL,
        2.0,
        note=_note(rounded[1], plain[1]),
    )


def _timings(setup: Setup, make: MakeLinear, decode: Shape, prefill: Shape) -> tuple[Timing, Timing]:
    """Of a runner of its own, whose memory is given back."""
    setup.release()
    spec = setup.spec("8B")
    dtype = torch.bfloat16 if make is not make_linear else setup.dtype
    with torch.inference_mode():
        weights = build_weights(spec, DummyTensors(0, dtype, setup.device), make)
    context, blocks = max(decode.context, prefill.chunk) + 1, max(decode.num_blocks, prefill.num_blocks)
    runner = make_runner(setup, spec, weights, scheduler_config(decode.decodes, prefill.chunk, context, blocks))
    first = time_shape(setup, runner, decode, setup.size(20, 2))
    return first, time_shape(setup, runner, prefill, setup.size(5, 2))


def _note(rounded: Timing, plain: Timing) -> str:
    return f"fp8 {rounded.step * 1e3:.4g} ms (device {rounded.device * 1e3:.4g}), bf16 {plain.step * 1e3:.4g} ms"
