"""The C++ library by ctypes: its structures, calls and threads.

The library is a plain shared object beside this file, without Python and torch, so that one build serves every version
of both. If it is missing (no compiler at install, another processor), steps run in torch. The structures mirror
src/abi.h, which documents them; their sizes are compared at load.
"""

import ctypes
import enum
import functools
import platform
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.cpu.native import LIBRARY, is_built
from engine.execution.stream import HugePages

_ABI = 15
_ERROR_BYTES = 256


class Level(enum.IntEnum):
    """Instruction sets; each level requires the lower ones."""

    AVX2 = 0
    AVX512 = 1
    BF16 = 2
    AMX = 3


class Kind(enum.IntEnum):
    """Kinds of operations."""

    EMBED = 0
    ANGLES = 1
    NORM = 2
    GATHER_NORM = 3
    LINEAR = 4
    ROPE_KV = 5
    ATTEND = 6
    MERGE = 7
    BEST = 8
    QUANTIZE = 9
    GATHER = 10


class Int8(enum.IntEnum):
    """Arithmetic of 8-bit linear layers: 16-bit pairs, available at every level, or bytes."""

    WORDS = 1
    BYTES = 2


class Epilogue(enum.IntEnum):
    """Operation applied to the outputs of a linear layer."""

    PLAIN = 0
    SWIGLU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    LOGITS = 5
    GEGLU = 6

    @property
    def gates(self) -> bool:
        """Whether there is one output per two outputs of the layer."""
        return self in (Epilogue.SWIGLU, Epilogue.GEGLU)


TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_PROBLEMS = {
    1: "the step has more tokens, samples or chunks than the buffers hold",
    2: "a chunk is outside of its row",
    3: "a token is outside of the vocabulary",
    4: "a block is outside of the pool",
    5: "out of memory",
}


class TapeShape(Structure):
    """`tm_shape`."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "value_dim", "cell")),
        *((name, c_int64) for name in ("rotary_dim", "hidden", "layers", "vocab")),
        *((name, c_int64) for name in ("block_size", "pool_units", "num_rows", "max_blocks", "max_positions")),
        ("max_tokens", c_int64),
        ("max_samples", c_int64),
        ("rounds_once", c_int64),
        ("int8_cache", c_int64),
        ("level", c_int32),
        ("type", c_int32),
        ("scale", c_float),
        ("rotary_scaling", c_float),
        ("inverse_frequencies", c_void_p),
        ("long_frequencies", c_void_p),
    )


class Op(Structure):
    """`tm_op`."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "epilogue", "layer", "halves")),
        *((name, c_int64) for name in ("n", "k", "in_stride", "out_stride")),
        *((name, c_void_p) for name in ("input", "other", "weight", "bias", "scales", "out", "residual")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        ("int8", c_int32),
        ("sampled", c_int32),
        ("group", c_int32),
    )


class TapeStep(Structure):
    """`tm_step`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_chunks", "token_stride", "table_stride", "logits_stride")),
        *((name, c_void_p) for name in ("chunks", "tokens", "k_table", "v_table", "num_blocks", "pool")),
        *((name, c_void_p) for name in ("logits", "best", "best_id", "is_long", "num_prompt")),
    )


class StepError(RuntimeError):
    """The library refused a step; nothing was run."""


class Library:
    """A loaded library. Raises OSError or ConfigError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(str(path))
        self._declare()
        self._pages = HugePages()
        sizes = [self._calls.tm_struct_bytes(which) for which in range(3)]
        if self._calls.tm_abi() != _ABI or sizes != [ctypes.sizeof(each) for each in (TapeShape, Op, TapeStep)]:
            raise ConfigError(f"{path} is from another version; build it again")

    def _declare(self) -> None:
        error = (c_char_p, c_int64)
        weight = (c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p)
        integers = (c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p)
        nibbles = (c_int64, c_int64, c_int64, c_int32, c_void_p, c_void_p)
        calls: dict[str, tuple[object, tuple[object, ...]]] = {
            "tm_abi": (c_int32, ()),
            "tm_struct_bytes": (c_int64, (c_int32,)),
            "tm_has_level": (c_int32, (c_int32,)),
            "tm_team_new": (c_void_p, (c_int32, *error)),
            "tm_team_delete": (None, (c_void_p,)),
            "tm_team_resize": (None, (c_void_p, c_int32)),
            "tm_team_threads": (c_int32, (c_void_p,)),
            "tm_tape_new": (c_void_p, (POINTER(TapeShape), POINTER(Op), c_int64, *error)),
            "tm_tape_delete": (None, (c_void_p,)),
            "tm_tape_run": (c_int32, (c_void_p, c_void_p, POINTER(TapeStep))),
            "tm_tape_begin": (c_int32, (c_void_p, c_void_p, POINTER(TapeStep))),
            "tm_tape_run_ops": (c_int32, (c_void_p, c_void_p, c_int64, c_int64)),
            "tm_tape_set_weight": (c_int32, (c_void_p, c_int64, c_void_p)),
            "tm_linear": (c_int32, (c_int32, c_int32, POINTER(Op), c_int64, c_void_p)),
            "tm_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
            "tm_pack": (None, weight),
            "tm_unpack": (None, weight),
            "tm_has_int8": (c_int32, (c_int32, c_int32)),
            "tm_int8_bytes": (c_int64, (c_int64, c_int64)),
            "tm_pack_int8": (None, integers),
            "tm_unpack_int8": (None, integers),
            "tm_int4_bytes": (c_int64, (c_int64, c_int64, c_int64)),
            "tm_pack_int4": (None, nibbles),
            "tm_unpack_int4": (None, nibbles),
        }
        for name, (result, arguments) in calls.items():
            call = getattr(self._calls, name)
            call.restype, call.argtypes = result, arguments

    def levels(self) -> list[Level]:
        """Return the levels supported by processor and system, lowest first."""
        return [level for level in Level if self._calls.tm_has_level(level)]

    def room(self, num_bytes: int) -> Tensor:
        """Allocate memory for panels."""
        return self._pages.empty(num_bytes)

    def pack(self, weight: Tensor, halves: bool) -> Tensor:
        """Pack weight [n, k] into panels (bytes). `halves`: interleave outputs i and n / 2 + i."""
        n, k = weight.shape
        kind = TYPES[weight.dtype]
        panels = self.room(self._calls.tm_packed_bytes(kind, n, k))
        rows = weight.contiguous()
        self._calls.tm_pack(kind, n, k, halves, rows.data_ptr(), panels.data_ptr())
        return panels

    def unpack(self, panels: Tensor, shape: tuple[int, int], dtype: torch.dtype, halves: bool) -> Tensor:
        """Return the packed weight [n, k]."""
        weight = torch.empty(shape, dtype=dtype)
        self._calls.tm_unpack(TYPES[dtype], *shape, halves, panels.data_ptr(), weight.data_ptr())
        return weight

    def int8(self, level: Level) -> Int8:
        """Return the fastest 8-bit arithmetic of a level."""
        return Int8.BYTES if self._calls.tm_has_int8(level, Int8.BYTES) else Int8.WORDS

    def pack_int8(self, values: Tensor, scales: Tensor, halves: bool) -> Tensor:
        """Pack values [n, k] int8 and scales [n] float32 into panels (bytes)."""
        n, k = values.shape
        panels = self.room(self._calls.tm_int8_bytes(n, k))
        rows, each = values.contiguous(), scales.contiguous()
        self._calls.tm_pack_int8(n, k, halves, rows.data_ptr(), each.data_ptr(), panels.data_ptr())
        return panels

    def unpack_int8(self, panels: Tensor, shape: tuple[int, int], halves: bool) -> tuple[Tensor, Tensor]:
        """Return the packed values and scales."""
        values, scales = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0])
        self._calls.tm_unpack_int8(*shape, halves, panels.data_ptr(), values.data_ptr(), scales.data_ptr())
        return values, scales

    def pack_int4(self, parts: Sequence[Tensor], halves: bool) -> Tensor:
        """Pack values [n, k / 2], scales [n, groups] float16, zero points and base [n] float32 into panels (bytes)."""
        kept = [part.contiguous() for part in parts]
        sizes = _sizes_of(kept)
        panels = self.room(self._calls.tm_int4_bytes(*sizes))
        self._calls.tm_pack_int4(*sizes, halves, _addresses(kept), panels.data_ptr())
        return panels

    def unpack_int4(self, panels: Tensor, shape: tuple[int, int], group: int, halves: bool) -> list[Tensor]:
        """Return the packed parts."""
        (n, k), groups = shape, shape[1] // group
        values, zeros = (torch.empty(n, size, dtype=torch.uint8) for size in (k // 2, groups))
        parts = [values, torch.empty(n, groups, dtype=torch.float16), zeros, torch.empty(n)]
        self._calls.tm_unpack_int4(n, k, group, halves, panels.data_ptr(), _addresses(parts))
        return parts

    def linear(self, level: Level, dtype: torch.dtype, op: Op, rows: int, team: "Team") -> None:
        """Run one linear layer on `rows` rows of op.input. Raises StepError for a wrong size."""
        if self._calls.tm_linear(level, TYPES[dtype], ctypes.byref(op), rows, team.handle):
            raise StepError("the sizes of a linear layer do not match its buffers")


def _sizes_of(parts: Sequence[Tensor]) -> tuple[int, int, int]:
    """Return outputs, inputs and the group of a weight of 4 bits."""
    (n, half), groups = parts[0].shape, parts[1].shape[1]
    return n, 2 * half, 2 * half // groups


def _addresses(parts: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    """Return `tm_int4`."""
    return (c_void_p * len(parts))(*(part.data_ptr() for part in parts))


class Team:
    """Threads of steps, including the caller's. They sleep between steps and are stopped before a fork."""

    def __init__(self, library: Library, threads: int) -> None:
        self._calls = library._calls
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.handle: int | None = self._calls.tm_team_new(threads, error, _ERROR_BYTES)
        if not self.handle:
            raise ConfigError(f"starting the threads failed: {error.value.decode()}")

    @property
    def threads(self) -> int:
        return int(self._calls.tm_team_threads(self.handle))

    def resize(self, threads: int) -> None:
        """Set the number of threads from the next step on."""
        self._calls.tm_team_resize(self.handle, threads)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._calls.tm_team_delete(self.handle)
            self.handle = None


class Tape:
    """A sequence of operations; the caller keeps their buffers alive. Raises ConfigError for an invalid sequence."""

    def __init__(self, library: Library, shape: TapeShape, ops: Sequence[Op]) -> None:
        self._calls = library._calls
        array = (Op * len(ops))(*ops)
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._handle: int | None = self._calls.tm_tape_new(ctypes.byref(shape), array, len(ops), error, _ERROR_BYTES)
        if not self._handle:
            raise ConfigError(f"the native library refused the model: {error.value.decode()}")

    def run(self, team: Team, step: TapeStep) -> None:
        """Run a step. Raises StepError for an invalid step, before anything has run."""
        result = self._calls.tm_tape_run(self._handle, team.handle, ctypes.byref(step))
        if result:
            raise StepError(_PROBLEMS[result])

    def begin(self, team: Team, step: TapeStep) -> None:
        """Check and plan a step to be run in parts by `run_ops`; keep it alive until then. Raises StepError."""
        result = self._calls.tm_tape_begin(self._handle, team.handle, ctypes.byref(step))
        if result:
            raise StepError(_PROBLEMS[result])

    def run_ops(self, team: Team, first: int, last: int) -> None:
        """Run the operations [first, last) of the step. Raises StepError."""
        result = self._calls.tm_tape_run_ops(self._handle, team.handle, first, last)
        if result:
            raise StepError(_PROBLEMS[result])

    def set_weight(self, op: int, weight: int) -> None:
        """Set the weight address of a linear operation."""
        if self._calls.tm_tape_set_weight(self._handle, op, weight):
            raise StepError("the operation is not a linear layer, or the address is null")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._calls.tm_tape_delete(self._handle)
            self._handle = None


def activation_dtype(level: Level) -> torch.dtype:
    """Return the type of activations: bfloat16 if products use it, else float32, rounded to the model's type."""
    return torch.bfloat16 if level >= Level.BF16 else torch.float32


@functools.cache
def load() -> Library | str:
    """Load the library of this installation; return the reason if that is impossible."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"there are no native kernels for {platform.system()} on {platform.machine()}"
    if not is_built():
        return "the native kernels were not built (building needs g++ at install)"
    try:
        library = Library(LIBRARY)
    except (OSError, AttributeError, ConfigError) as error:
        return f"the native kernels cannot be loaded: {error}"
    return library if library.levels() else "this processor lacks AVX2, FMA or F16C, which all native kernels need"
