"""Every configuration compiles for its architecture, without a GPU, and the machine code looks as it was meant to.

A wrapper runs on meta tensors with its kernels replaced by recorders, so that exactly what it would launch is compiled.
Checked in the machine code: no spills, registers, shared memory, matrix instructions, 16-byte loads. Nothing runs.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from engine.models.attention import Manner, PoolView  # noqa: E402
from engine.triton_kernels import (  # noqa: E402
    configs,
    decode_attention,
    draw,
    hidden_state,
    layer_norm,
    lora,
    penalties,
    prefill_attention,
    rms_norm,
    rope_cache_write,
    round_rows,
    silu_and_mul,
)
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch  # noqa: E402

META = torch.device("meta")
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
SHARED_MEMORY = {90: 227 * 1024, 80: 99 * 1024}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class Binary:
    """What came out of the compiler for one launch."""

    name: str
    registers: int
    stack: int
    shared: int
    sass: str

    def instructions(self, name: str) -> list[str]:
        """All instructions of that name with their modifiers, e.g. LDG.E.128."""
        return re.findall(rf"\b{name}(?:\.[\w.]+)?\b", self.sass)


class Recorder:
    """Stands for a kernel; keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**16 for size in grid[1:]) and grid[0] > 0, "beyond what a grid may be"
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


class Compiler:
    """`launch(module, function, ...)` calls a wrapper; `binaries` are what its launches compile to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = monkeypatch, folder

    def launch(self, module: ModuleType, function: str, arch: int, *args: Any, **kwargs: Any) -> list[Binary]:
        launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        with self.patch.context() as patch:
            patch.setattr(configs, "device_arch", lambda device: arch)
            for name, value in vars(module).copy().items():
                if name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(value, launches))
            getattr(module, function)(*args, **kwargs)
        assert launches, "nothing was launched"
        return [self.compile(*launch, arch) for launch in launches]

    def compile(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Binary:
        options = {name: value for name, value in kwargs.items() if name in OPTIONS}
        source = specialize(kernel, args, {name: value for name, value in kwargs.items() if name not in OPTIONS})
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin = self.folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = self.tool("cuobjdump", "-res-usage", str(cubin))
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        sass = self.tool("cuobjdump", "-sass", str(cubin))
        return Binary(kernel.__name__, int(found[1]), int(found[2]), compiled.metadata.shared, sass)

    @staticmethod
    def tool(name: str, *args: str) -> str:
        return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def specialize(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Triton makes of a call: types, constants, and which arguments are multiples of 16."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    assert len(values) == len(args) + len(kwargs) == len(kernel.params), "arguments and parameters differ"
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for number, parameter in enumerate(kernel.params):
        value, free = values[parameter.name], parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not free):
            signature[parameter.name], constants[number,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name], aligned = TYPES[value.dtype], True
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            aligned = isinstance(value, int) and value % 16 == 0 and not free
        if aligned:
            attributes[number,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield Compiler(monkeypatch, tmp_path)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def check(binary: Binary, arch: int) -> None:
    assert binary.stack == 0 and not binary.instructions("STL") and not binary.instructions("LDL"), "spills"
    assert 16 <= binary.registers <= 255
    assert binary.shared <= SHARED_MEMORY[arch]


def check_wide_copies(binary: Binary) -> None:
    """K and V go to shared memory asynchronously, 16 bytes at a time."""
    copies = binary.instructions("LDGSTS")
    assert copies and all(copy.endswith(".128") for copy in copies)


def check_counting(binary: Binary) -> None:
    """What a program has left in scratch is seen by whoever sees that it has arrived, by all of its threads: a barrier,
    a fence, the addition, and a first-level cache that knows nothing of before."""
    order = re.findall(r"\b(BAR\.SYNC|MEMBAR\.\w+(?:\.\w+)*|ATOMG?\.E\.ADD|CCTL\.IVALL)\b", binary.sass)
    at = next(number for number, name in enumerate(order) if name.startswith("ATOM"))
    before, after = order[:at], order[at + 1 :]
    fence = next(number for number in reversed(range(at)) if before[number].startswith("MEMBAR"))
    assert before[fence].endswith("GPU") and "BAR.SYNC" in before[:fence], order
    assert after[:2] == ["CCTL.IVALL", "BAR.SYNC"] and sum(name.startswith("ATOM") for name in order) == 1, order


def attention_inputs(
    head_dim: int, group: int, dtype: torch.dtype, table: torch.dtype
) -> tuple[torch.Tensor, PoolView]:
    kv_heads = 8
    tables = meta(64, 512, dtype=table), meta(64, 512, dtype=table)
    pool = PoolView(meta(999, 16, kv_heads, head_dim, dtype=dtype), *tables, 900)
    return meta(32, kv_heads * group, head_dim, dtype=dtype), pool


def scratch_of(items: int, q: torch.Tensor) -> Scratch:
    partial = meta(items, *q.shape[1:], dtype=torch.float32), meta(items, q.shape[1], dtype=torch.float32)
    return Scratch(*partial, meta(items, 8, dtype=torch.int32))


def compile_decode(
    compiler: Compiler, arch: int, head_dim: int, group: int, dtype: torch.dtype, table: torch.dtype, **features: Any
) -> None:
    q, pool = attention_inputs(head_dim, group, dtype, table)
    tile = configs.decode_config(arch, head_dim, group, dtype)
    work = DecodeWork(32, 98, tile.block_n, META)
    given = q, pool, work, scratch_of(98, q), q
    (split,) = compiler.launch(
        decode_attention, "decode_attention", arch, *given, layer=5, manner=Manner(0.1, **features)
    )  # fmt: skip
    check(split, arch)
    check_wide_copies(split)
    check_counting(split)
    if dtype == torch.float32:
        return
    # Two programs fit into a multiprocessor's shared memory and registers (64 K), so that one computes as one waits.
    assert 2 * split.shared <= SHARED_MEMORY[arch] and 2 * split.registers * 32 * tile.num_warps <= 65536
    assert split.instructions("HMMA")
    # A tile of K and of V is in flight while another is used: the wait in the loop leaves two groups outstanding.
    waits = re.findall(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", split.sass)
    assert tile.num_stages < 3 or any(int(wait, 16) >= 2 for wait in waits)


def compile_prefill(
    compiler: Compiler, arch: int, head_dim: int, group: int, dtype: torch.dtype, table: torch.dtype, **features: Any
) -> None:
    q, pool = attention_inputs(head_dim, group, dtype, table)
    tile = configs.prefill_config(arch, head_dim, dtype)
    slots = configs.prefill_slots(8, 132)
    work = PrefillWork(8, 100 + slots, tile.block_m // group, META, slots=slots, tile=tile.block_n).head(
        8, 100 + slots, 512, fixed=True
    )
    given = q, pool, work, scratch_of(work.partials, q), q
    binary, merge = compiler.launch(
        prefill_attention, "prefill_attention", arch, *given, layer=5, manner=Manner(0.1, **features)
    )
    for each in (binary, merge):
        check(each, arch)
    check_wide_copies(binary)
    if dtype.itemsize == 2:
        assert tile.block_m >= 64
        matrix, other = ("HGMMA", "HMMA") if arch == 90 else ("HMMA", "HGMMA")
        assert binary.instructions(matrix) and not binary.instructions(other)


ATTENTION = {"decode": compile_decode, "prefill": compile_prefill}
# Llama 3, Qwen 2.5, Gemma-like, OPT and Phi-3 shapes.
USUAL = [(90, 128, 4), (90, 64, 7), (90, 256, 2), (90, 80, 1), (80, 128, 4), (80, 96, 1)]


@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize(("arch", "head_dim", "group"), USUAL)
def test_attention(compiler: Compiler, phase: str, arch: int, head_dim: int, group: int) -> None:
    ATTENTION[phase](compiler, arch, head_dim, group, torch.bfloat16, torch.int32)


@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize(
    ("arch", "head_dim", "group", "features"),
    [
        (90, 128, 4, {"window": 4096}),
        (90, 256, 2, {"softcap": 50.0}),
        (80, 256, 2, {"softcap": 50.0}),
        (80, 64, 8, {"window": 128, "sinks": meta(64, dtype=torch.float32)}),
    ],
    ids=["mistral", "gemma-90", "gemma-80", "gpt-oss"],
)
def test_attention_with_features(
    compiler: Compiler, phase: str, arch: int, head_dim: int, group: int, features: dict[str, Any]
) -> None:
    ATTENTION[phase](compiler, arch, head_dim, group, torch.bfloat16, torch.int32, **features)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_of_every_shape(compiler: Compiler, phase: str, arch: int, head_dim: int, dtype: torch.dtype) -> None:
    groups = range(1, 9) if dtype == torch.bfloat16 else [7]
    for group in groups:
        ATTENTION[phase](compiler, arch, head_dim, group, dtype, torch.int32)
    ATTENTION[phase](compiler, arch, head_dim, 4, dtype, torch.int64)


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize(
    ("head_dim", "rotary", "heads", "norm"),
    [(128, 128, 32, False), (128, 128, 16, True), (80, 20, 32, False), (64, 0, 12, False)],
)
def test_rope_and_cache_write(
    compiler: Compiler, arch: int, head_dim: int, rotary: int, heads: int, norm: bool
) -> None:
    tokens = meta(512, (heads + 16) * head_dim).unflatten(1, (heads + 16, head_dim))
    q, k, v = tokens.split([heads, 8, 8], dim=1)
    index, table = meta(512, dtype=torch.int32), meta(64, 512, dtype=torch.int32)
    weight = meta(head_dim) if norm else None
    cos_sin = meta(4096, rotary, dtype=torch.float32) if rotary else None
    (binary,) = compiler.launch(
        rope_cache_write, "rope_cache_write", arch, q, k, v, cos_sin, index, index,
        PoolView(meta(999, 16, 8, head_dim), table, table, 900), layer=5, q_norm=weight, k_norm=weight,
    )  # fmt: skip
    check(binary, arch)
    assert binary.registers <= 96
    check_wide_access(binary)


def check_wide_access(binary: Binary) -> None:
    """Reads and writes of the bulk of the data take 16 bytes a thread."""
    assert any(load.endswith(".128") for load in binary.instructions("LDG")), binary.instructions("LDG")
    assert any(store.endswith(".128") for store in binary.instructions("STG")), binary.instructions("STG")


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_norms(compiler: Compiler, arch: int, width: int) -> None:
    x, weight = meta(512, width), meta(width)
    binaries = compiler.launch(rms_norm, "add_rms_norm", arch, x, x, weight, 1e-5)
    binaries += compiler.launch(layer_norm, "add_layer_norm", arch, x, x, weight, weight, 1e-5)
    for binary in binaries:
        check(binary, arch)
        check_wide_access(binary)


@pytest.mark.parametrize("arch", [90, 80])
def test_copies_and_activation(compiler: Compiler, arch: int) -> None:
    x, index, table = meta(512, 4096), meta(512, dtype=torch.int32), meta(64, 512, dtype=torch.int32)
    cache = x, index, index, meta(999, 16, 32, 128), table
    binaries = compiler.launch(silu_and_mul, "silu_and_mul", arch, x)
    binaries += compiler.launch(silu_and_mul, "gelu_tanh_and_mul", arch, x)
    binaries += compiler.launch(hidden_state, "hidden_write", arch, *cache, layer=5, scratch_base=900)
    binaries += compiler.launch(hidden_state, "hidden_gather", arch, *cache, layer=5, scratch_base=900)
    binaries += compiler.launch(hidden_state, "unit_copy", arch, x, x, meta(9, 2, dtype=torch.int64))
    for binary in binaries:
        check(binary, arch)
        check_wide_access(binary)
    bits = meta(8, 4000, dtype=torch.int32)
    for binary in compiler.launch(penalties, "token_mask", arch, meta(64, 128000), meta(8, dtype=torch.int32), bits):
        check(binary, arch)


@pytest.mark.parametrize(
    ("arch", "dtype", "sizes"),
    [
        (80, torch.bfloat16, [(576, 960)]),
        (90, torch.bfloat16, [(4096, 6144), (14336, 4096), (576, 960)]),
        (120, torch.bfloat16, [(14336, 4096)]),
        (90, torch.float32, [(4096, 6144)]),
    ],
)
def test_adapters(compiler: Compiler, arch: int, dtype: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    slots, table = meta(64, dtype=torch.int32), meta(64, 3, dtype=torch.int64)
    for width, outputs in sizes:
        splits = -(-width // configs.LORA_SPLIT)
        scratch = meta(splits, 256, 192, dtype=torch.float32)
        rows = meta(64, width, dtype=dtype), meta(64, outputs, dtype=dtype)
        binaries = compiler.launch(lora, "lora_add", arch, *rows, slots, table, scratch)
        assert len(binaries) == 2 and all(each.stack == 0 and each.registers <= 128 for each in binaries)


@pytest.mark.parametrize(("arch", "widths"), [(89, [4096]), (90, [896, 14336]), (120, [14336])])
def test_rounding_to_floats_of_8_bits(compiler: Compiler, arch: int, widths: list[int]) -> None:
    for width in widths:
        (binary,) = compiler.launch(round_rows, "round_rows", arch, meta(64, width))
        assert binary.stack == 0 and binary.registers <= 64
        assert any(
            load.endswith(".128") for load in binary.instructions("LDG")
        )  # eight values, which come out as bytes
        assert any(store.endswith(".64") for store in binary.instructions("STG"))
        one = meta(1, dtype=torch.float32)
        (binary,) = compiler.launch(round_rows, "scale_rows", arch, meta(64, width), one)
        assert binary.stack == 0 and binary.registers <= 64
        for scale in (one, None):
            binaries = compiler.launch(silu_and_mul, "silu_and_mul_rounded", arch, meta(64, 2 * width), scale)
            rows, weight = (meta(64, width), meta(64, width)), meta(width)
            binaries += compiler.launch(rms_norm, "add_rms_norm_rounded", arch, *rows, weight, 1e-5, scale)
            binaries += compiler.launch(rms_norm, "rms_norm_rounded", arch, rows[0], weight, 1e-5, scale)
            assert len(binaries) == 3 and all(each.stack == 0 for each in binaries)


@pytest.mark.parametrize(("arch", "dtype"), [(90, torch.bfloat16), (80, torch.float32)], ids=str)
def test_sampling(compiler: Compiler, arch: int, dtype: torch.dtype) -> None:
    index, floats = meta(64, dtype=torch.int32), meta(64, dtype=torch.float32)
    wishes = meta(64, dtype=torch.float64), floats, index, floats, floats
    binaries = compiler.launch(draw, "draw", arch, meta(64, 128256, dtype=dtype), index, *wishes)
    history, penalty = meta(64, 128256, dtype=torch.int32), meta(64, 3, dtype=torch.float32)
    logits = meta(64, 128256, dtype=torch.float32)
    binaries += compiler.launch(penalties, "penalise", arch, logits, index, index, history, penalty)
    for binary in binaries:
        check(binary, arch)
    (counted,) = compiler.launch(penalties, "count_tokens", arch, history, index, index, index)
    assert counted.stack == 0 and counted.registers <= 16


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"7\.5"):
        configs.decode_config(75, 128, 4, torch.bfloat16)
    with pytest.raises(AssertionError, match="512"):
        configs.prefill_config(90, 512, torch.bfloat16)


@pytest.mark.parametrize(("arch", "as_arch"), [(86, 80), (89, 80), (120, 80), (100, 90)])
def test_other_devices_take_the_row_that_fits_their_shared_memory(arch: int, as_arch: int) -> None:
    for head_dim in (64, 128, 256):
        found = configs.prefill_config(arch, head_dim, torch.bfloat16)
        assert found == configs.prefill_config(as_arch, head_dim, torch.bfloat16)
