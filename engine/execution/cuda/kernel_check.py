"""Check of kernels against their torch twins, and of graphs against eager steps, on the card that will serve.

Small devices run the first layers of the model over a cache of random values: decodes behind contexts that are split,
then decodes beside a chunk with a long past, with copies to the host and back, a LoRA adapter, and hidden state where
the engine uses them. A kernel that raises or differs is replaced by its twin.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine import __version__
from engine.api import MAX_LOGPROBS, SamplingParams
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.errors import ConfigError
from engine.execution.cuda.device import SLOTS, CudaDevice
from engine.execution.masks import StepMasks
from engine.execution.rows import UNKNOWN
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.machine.facts import cuda_driver
from engine.models.attention import PoolView
from engine.models.byte_cells import ByteSlices, is_bytes
from engine.models.lora import Delta, Site
from engine.models.spec import ModelSpec
from engine.models.weights import matrices
from engine.scheduling.output import NewRequest, SchedulerOutput
from engine.triton_kernels import Kernels, configs, twins
from engine.triton_kernels.work import DecodeWork

TOLERANCE = {
    torch.float64: 1e-5, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.int8: 6e-2,
    torch.float8_e4m3fn: 0.15,
}  # fmt: skip
"""Largest error of a kernel by the type of its result, relative to the value plus the root mean square of all values.
Results of other types are equal, up to one draw, which a rounding may move to the next token."""
_WRITES = {
    "accept_tokens": ("sampled", "last_tokens"),
    "begin_step": ("tables", "ids", "positions", "angles", "uniform", "work"), "count_tokens": ("history",),
    "decode_attention": ("out",), "hidden_gather": ("out",), "hidden_write": ("pool",), "lora_add": ("y",),
    "penalise": ("logits",), "prefill_attention": ("out",), "rope_cache_write": ("q", "pool"), "softcap": ("out",),
    "token_mask": ("logits",), "unit_copy": ("target",),
}  # fmt: skip
"""Parameters that a kernel changes in place."""
_ROWS, _CHUNK = 9, 40
_PASTS, _LONG_PAST = range(300, 600, 37), 1100
"""Contexts of decodes, in turn, which have several splits; past of the chunk, which has more than MIN_PREFILL_SPLIT."""
_DECODES = 3
"""Number of steps in which each of these contexts has a decode."""
_RANK = 24
_PARAMS = (
    SamplingParams(1, temperature=0.0),
    SamplingParams(1, temperature=1.0, seed=1),
    SamplingParams(1, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(
        1, temperature=0.7, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=((0, 1.0),), top_p=0.5,
        logprobs=MAX_LOGPROBS, seed=3,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelFaults:
    """Result of the check.

    Attributes:
        kernels: Operations that run by their twins, with the fault of the kernel.
        graphs: Why steps run without CUDA graphs; empty: they run from graphs.
    """

    kernels: dict[str, str] = field(default_factory=dict)
    graphs: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """One line per fault."""
        found = [f"the kernel {name} {fault}; torch runs this operation" for name, fault in self.kernels.items()]
        return (*found, *([f"steps run without CUDA graphs: {self.graphs}"] if self.graphs else []))


MakeDevice = Callable[[ModelSpec, Limits, Kernels, bool], CudaDevice]
"""(first layers of the model, limits, kernels, whether to capture graphs) -> device with the model's weights."""


def check_kernels(spec: ModelSpec, limits: Limits, kernels: Kernels, make: MakeDevice, *, graphs: bool) -> KernelFaults:
    """Compare kernels and graphs of a model on its device. Raise ConfigError if a kernel disables the device."""
    small, few = _first_layers(spec), _few(spec, limits)
    trial = KernelTrial(kernels)
    probe(make(small, few, trial.kernels, False), small, few)
    waits = [name for name in trial.faults if name in twins.WAITING]
    if waits or not graphs:
        return KernelFaults(trial.faults, f"the twin of {waits[0]} waits for the device" if waits else "")
    usable = with_twins(kernels, trial.faults)
    expected = probe(make(small, few, usable, False), small, few)
    try:
        device = make(small, few, usable, True)
        missing = device.num_shapes - device.num_graphs
        error = max(_error(*pair) for pair in zip(probe(device, small, few), expected, strict=True))
    except RuntimeError as raised:
        return KernelFaults(trial.faults, f"a capture raised {_first_line(raised)}")
    if missing:
        return KernelFaults(trial.faults, f"{missing} captures failed")
    differs = error > TOLERANCE[expected[0].dtype]
    return KernelFaults(trial.faults, f"a replay differs from an eager step by {error:.2g}" if differs else "")


FAULT_SECONDS = 86_400.0
"""Time for which a fault is remembered: another program may have held the memory, or a new driver mends it."""


def remembered(
    folder: Path, key: Sequence[object], check: Callable[[], KernelFaults], say: Callable[[str], None]
) -> KernelFaults:
    """Return the result of `check`, stored in the folder by key, card, and versions of driver, libraries and code.

    Faults are checked again after FAULT_SECONDS.
    """
    versions = torch.__version__, importlib.import_module("triton").__version__, __version__, cuda_driver()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    code = [path.read_bytes() for path in sorted(Path(twins.__file__).parent.glob("*.py"))]
    text = repr((*key, card, *versions)).encode() + b"".join(code)
    path = folder / "kernels" / f"{hashlib.sha256(text).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        found, age = KernelFaults(**json.loads(path.read_text())), time.time() - path.stat().st_mtime
        if not found.lines:
            return found
        if 0.0 <= age < FAULT_SECONDS:
            say(f"faults of kernels found {age / 3600:.1f} hours ago; remove {path} to check them again")
            return found
    say("checking the kernels of this GPU; the first time they are compiled, for up to a minute")
    faults = check()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(faults)))
        temporary.replace(path)
    return faults


def with_twins(kernels: Kernels, names: Sequence[str] | dict[str, str]) -> Kernels:
    """Return the kernels with twins in place of those in `names`."""
    if not names:
        return kernels
    mixed: Any = ModuleType("mixed_kernels")
    for name in twins.__all__:
        setattr(mixed, name, getattr(twins if name in names else kernels, name))
    return mixed  # type: ignore[no-any-return]


class KernelTrial:
    """Compares calls of `kernels` with twins, whose results the caller gets. `faults`: as `KernelFaults.kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self.faults: dict[str, str] = {}
        self.kernels: Kernels = ModuleType("tried_kernels")
        for name in twins.__all__:
            call = partial(self._call, name, getattr(kernels, name), getattr(twins, name))
            setattr(self.kernels, name, call)

    def _call(self, name: str, kernel: Callable[..., Any], twin: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if name in self.faults:
            return twin(*args, **options)
        regions = _regions(name, twin, args, options)
        before = [region.memory.clone() for region in regions]
        result = twin(*args, **options)
        expected = [each.clone() for each in _tensors(result)]
        written = [region.memory.clone() for region in regions]
        for region, old in zip(regions, before, strict=True):
            region.memory.copy_(old)
        try:
            returned = _tensors(kernel(*args, **options))
            _synchronize(name, args)
        except ConfigError:
            raise
        except Exception as raised:  # of Triton, its compiler, or the driver
            self.faults[name] = f"raised {_first_line(raised)}"
        else:
            pairs = [*zip(returned, expected, strict=True)]
            for region, old, new in zip(regions, before, written, strict=True):
                pairs.append(region.changes(old, new))
            for actual, correct in pairs:
                error, allowed = _error(actual, correct), TOLERANCE.get(correct.dtype, float(name == "draw"))
                if error > allowed:
                    self.faults[name] = f"differs from torch by {error:.2g} ({correct.dtype}, allowed {allowed:g})"
        for region, new in zip(regions, written, strict=True):
            region.memory.copy_(new)
        return result


class _Region(NamedTuple):
    """Memory that a kernel writes. `cells`: shape of a slice in a pool of bytes."""

    memory: Tensor
    cells: tuple[int, ...] = ()

    def changes(self, before: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actual and the correct values where either differs from the values before."""
        old, new, now = (self._values(each) for each in (before, correct, self.memory))
        changed = (new != old) | (now != old)
        return now[changed], new[changed]

    def _values(self, memory: Tensor) -> Tensor:
        if not self.cells:
            return memory
        every = torch.arange(len(memory), device=memory.device)
        return ByteSlices(memory, *self.cells).read(every, torch.bfloat16)


def _regions(name: str, twin: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> list[_Region]:
    found, given = [], signature(twin).bind(*args, **options).arguments
    for parameter in _WRITES.get(name, ()):
        value = given.get(parameter)
        if isinstance(value, PoolView):
            cells = value.cells
            whole = cells.as_strided((len(cells), cells.stride(0)), (cells.stride(0), 1))
            found.append(_Region(whole, tuple(cells.shape[1:]) if is_bytes(cells.dtype) else ()))
        elif isinstance(value, DecodeWork):
            found += map(_Region, (value.requests, value.ranges, value.items))
        elif value is not None:
            found.append(_Region(value))
    return found


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result: none, one, or nested tuples."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in _tensors(part)]


def _error(actual: Tensor, correct: Tensor) -> float:
    """Return the largest error as in TOLERANCE; of integers, the number of different ones."""
    if not correct.numel():
        return 0.0
    if not correct.is_floating_point():
        return float((actual != correct).sum())
    a, b = actual.double(), correct.double()
    finite = b[b.isfinite()]
    scale = finite.square().mean().sqrt() if finite.numel() else 0.0
    errors = ((a - b).abs() / (b.abs() + scale)).masked_fill(a == b, 0.0)
    return float(errors.nan_to_num(torch.inf, torch.inf).max())


def _synchronize(name: str, args: Sequence[Any]) -> None:
    """Wait for a kernel. Raise ConfigError if the device runs nothing after it, or else the kernel's error."""
    device = next(each.device for each in args if isinstance(each, Tensor))
    if not configs.is_cuda(device):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ConfigError(f"the kernel {name} fails on this GPU ({_first_line(error)}); set --kernels torch") from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _first_layers(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the first layers: two, or up to the second kind if some layers have a window."""
    kinds = [spec.window_of(layer) is None for layer in range(spec.num_layers)]
    count = 2 if len(set(kinds)) == 1 else kinds.index(not kinds[0]) + 1
    return replace(spec, num_layers=min(count, spec.num_layers), windows=spec.windows[:count])


def _chunk_of(spec: ModelSpec) -> int:
    """Return the tokens of the chunk; with experts so many that their products have tiles of many rows."""
    sizes = spec.experts
    return _CHUNK if sizes is None else max(_CHUNK, configs.FEW_ROWS * sizes.total // sizes.per_token + 1)


def _few(spec: ModelSpec, limits: Limits) -> Limits:
    """Return the limits of a device for `probe`."""
    rows, chunk = min(_ROWS, limits.max_num_seqs), _chunk_of(spec)
    longest = min(_LONG_PAST + chunk, limits.max_model_len)
    blocks = rows + sum(
        -(-min(each + _DECODES, longest) // limits.block_size) for each in (*_PASTS[: rows - 1], longest)
    )
    tokens = max(rows, min(rows + chunk, limits.max_num_batched_tokens))
    return Limits(rows, tokens, longest, blocks * UNITS_PER_BLOCK, limits.block_size)


def probe(device: CudaDevice, spec: ModelSpec, limits: Limits) -> list[Tensor]:
    """Run the steps on an unused device over random tokens and a random cache. Return the logits of each step.

    The last steps have a LoRA adapter, and hidden state in the cache, if the device takes them.
    """
    last, longest = limits.max_num_seqs - 1, limits.max_model_len
    chunk = min(_chunk_of(spec), limits.max_num_batched_tokens - last, longest // 2)
    past = min(_LONG_PAST, longest - chunk)
    pasts = [min(each, longest - _DECODES) for each in _PASTS[:last]]
    requests = _requests([*(each + _DECODES for each in pasts), past + chunk], spec.vocab_size, limits)
    bits = np.full((1, -(-spec.vocab_size // 32)), 0x5555_5555, dtype=np.int32)  # every second token
    masks = StepMasks(np.zeros(1, dtype=np.int64), bits, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    with torch.inference_mode(), device.stream.use():
        _fill(device)
        if len(device.pool.host_units):
            device.swap_out(np.array([[1, 0], [2, 1]]))
            device.swap_in(np.array([[1, 0], [0, 3]]))
        device.rows.apply(SchedulerOutput(0, (), requests))
        decodes = [(row, each, 1, 1) for row, each in enumerate(pasts)] or [(0, past, 1, 1)]
        steps = [device.forward(np.array(decodes))[0].clone(), *_repeat(device, decodes)]
        beside = [(row, each + 1, 1, 1) for row, each in enumerate(pasts)]
        steps.append(device.forward(np.array([*beside, (last, past, chunk, 1)]), lambda: masks)[0].clone())
        if device.adapted:
            device.adapt(1, _deltas(device, spec))
            device.rows.adapters[: limits.max_num_seqs : 2] = 1
            again = [(row, each + 2, 1, 1) for row, each in enumerate(pasts)] or decodes
            steps.append(device.forward(np.array(again))[0].clone())
        if device.pool.scratch_blocks:
            device.restore(np.array([[0, 2, 3]]), np.zeros(1, dtype=np.int64))
            entry = CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (0,))
            tokens = requests[0].token_ids[: limits.block_size]
            device.rows.apply(SchedulerOutput(0, (), (requests[0]._replace(token_ids=tokens, entries=(entry,)),)))
            steps.append(device.forward(np.array([(0, len(tokens) - 1, 1, 1)]))[0].clone())
        device.stream.mark().synchronize()
    return steps


def _repeat(device: CudaDevice, decodes: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
    """Return the logits of two steps, of which the second repeats the first one position later.

    Its tokens are known to the device only: the same ones, whatever the first step samples.
    """
    chunks = np.array([each for each in decodes if not device.rows.sampling.edits[each[0]]])
    where, starts = chunks[:, 0], chunks[:, 1] + 1
    first, known = device.forward(chunks)[0].clone(), device.rows.tokens[where, starts]
    device.rows.tokens[where, starts] = UNKNOWN
    device.tables.last_tokens[:-1] = 1
    second = device.forward(chunks + np.array((0, 1, 0, 0)))[0].clone()
    device.rows.tokens[where, starts] = known
    return [first, second]


def _deltas(device: CudaDevice, spec: ModelSpec) -> dict[Site, Delta]:
    """Return an adapter that changes every matrix by about as much as its own size."""
    numbers, like, deltas = torch.Generator(device.pool.device).manual_seed(1), device.pool, {}
    for index, layer in enumerate(device.decoder.weights.layers):
        if index >= spec.num_layers:
            break
        for slot, matrix in zip(SLOTS, matrices(layer), strict=True):
            shapes = (_RANK, matrix.in_features), (matrix.out_features, _RANK)
            a, b = (torch.randn(each, generator=numbers, device=like.device) / each[1] ** 0.5 for each in shapes)
            deltas[Site(index, slot)] = Delta(a.to(like.dtype), b.to(like.dtype))
    return deltas


def _requests(lengths: Sequence[int], vocab: int, limits: Limits) -> tuple[NewRequest, ...]:
    """Return a request in each row with as many random tokens, and scattered blocks for them."""
    numbers = np.random.default_rng(0)
    blocks = iter((UNITS_PER_BLOCK * numbers.permutation(limits.num_units // UNITS_PER_BLOCK)).tolist())
    made = []
    for row, length in enumerate(lengths):
        firsts = [next(blocks) for _ in range(-(-length // limits.block_size))]
        entries = tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, (first, first + 1)) for first in firsts)
        tokens = tuple(numbers.integers(0, vocab, length).tolist())
        params = _PARAMS[row % len(_PARAMS)]
        made.append(NewRequest(row, f"check-{row}", tokens, length // 2, params, entries))
    return tuple(made)


def _fill(device: CudaDevice) -> None:
    """Fill the cache with the same random values in every call."""
    pool = device.pool
    numbers = torch.Generator(pool.device).manual_seed(0)
    count = (pool.num_units * pool.num_layers) * pool.block_size
    shape = (count, pool.num_kv_heads, pool.head_dim)
    values = torch.randn(shape, generator=numbers, device=pool.device, dtype=torch.float32).to(pool.dtype)
    pool.write(torch.arange(count, device=pool.device), values)
