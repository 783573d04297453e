"""Every configuration compiles for its architecture, without a GPU, and the machine code looks as it was meant to.

Checked in the machine code: no spills, registers, shared memory, matrix instructions, 16-byte loads. Nothing runs.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from compiled_kernels import ARCHS, MODELS, SHARED_MEMORY, Code, compile_code, launched, record  # noqa: E402
from dry_device import META  # noqa: E402
from support.tables import mostly_slow  # noqa: E402

from engine.models.attention import Manner, PoolView  # noqa: E402
from engine.models.experts import Routing  # noqa: E402
from engine.models.spec import ExpertSizes  # noqa: E402
from engine.triton_kernels import configs  # noqa: E402
from engine.triton_kernels.attention import (  # noqa: E402
    decode_attention,
    prefill_attention,
)
from engine.triton_kernels.cache import (  # noqa: E402
    hidden_gather,
    hidden_write,
    rope_cache_write,
    unit_copy,
)
from engine.triton_kernels.draw import (  # noqa: E402
    count_tokens,
    draw,
    penalise,
    token_mask,
)
from engine.triton_kernels.experts import (  # noqa: E402
    clamped_swiglu,
    grouped_product,
    route_experts,
    sum_experts,
)
from engine.triton_kernels.lora import lora_add  # noqa: E402
from engine.triton_kernels.norms import (  # noqa: E402
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_rounded,
    gelu_tanh_and_mul,
    round_rows,
    scale_rows,
    silu_and_mul,
    silu_and_mul_rounded,
    unpack_tiles,
)
from engine.triton_kernels.step_tokens import begin_step  # noqa: E402
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch  # noqa: E402


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def check(binary: Code, arch: int, *, stack: int = 0) -> None:
    """Check registers, shared memory and spills of at most `stack` bytes, each stored and loaded once."""
    assert binary.stack <= stack, "spills"
    for name in ("STL", "LDL"):
        assert len(binary.instructions(name)) <= stack // 8, "spills"
    assert 16 <= binary.registers <= 255
    assert binary.shared <= SHARED_MEMORY[arch] * 1024


def check_wide_copies(binary: Code) -> None:
    """K and V go to shared memory asynchronously, 16 bytes at a time."""
    copies = binary.instructions("LDGSTS")
    assert copies and all(copy.endswith(".128") for copy in copies)


def check_counting(binary: Code) -> None:
    """Check the order that makes the scratch of a program visible to the last one: a barrier of its threads, a fence,
    the addition, and an invalidated first-level cache."""
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
    arch: int, head_dim: int, group: int, dtype: torch.dtype, table: torch.dtype, **features: Any
) -> None:
    q, pool = attention_inputs(head_dim, group, dtype, table)
    tile = configs.decode_config(arch, head_dim, group, dtype)
    work = DecodeWork(32, 98, tile.block_n, META)
    given = q, pool, work, scratch_of(98, q), q
    (split,) = launched(arch, decode_attention, *given, layer=5, manner=Manner(0.1, **features))
    check(split, arch)
    check_wide_copies(split)
    check_counting(split)
    if dtype == torch.float32:
        return
    # Two programs fit into a multiprocessor's shared memory and registers (64 K), so that one computes as one waits.
    assert 2 * split.shared <= SHARED_MEMORY[arch] * 1024 and 2 * split.registers * 32 * tile.num_warps <= 65536
    assert split.instructions("HMMA")
    # A tile of K and of V is in flight while another is used: the wait in the loop leaves two groups outstanding.
    waits = re.findall(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", split.sass)
    assert tile.num_stages < 3 or any(int(wait, 16) >= 2 for wait in waits)


def compile_prefill(
    arch: int, head_dim: int, group: int, dtype: torch.dtype, table: torch.dtype, **features: Any
) -> None:
    q, pool = attention_inputs(head_dim, group, dtype, table)
    tile = configs.prefill_config(arch, head_dim, dtype)
    slots = configs.prefill_slots(8, 132)
    work = PrefillWork(8, 100 + slots, tile.block_m // group, META, slots=slots, tile=tile.block_n).head(
        8, 100 + slots, 512, fixed=True
    )
    given = q, pool, work, scratch_of(work.partials, q), q
    binary, merge = launched(arch, prefill_attention, *given, layer=5, manner=Manner(0.1, **features))
    for each in (binary, merge):
        # With heads of 64 and 64-bit tables ptxas spills one register around the loops to reach 64 registers. Other
        # tiles of float32, which serves comparisons only, spill more.
        check(each, arch, stack=8 if dtype == torch.float32 else 0)
    check_wide_copies(binary)
    if dtype.itemsize == 2:
        assert tile.block_m >= 64
        matrix, other = ("HGMMA", "HMMA") if arch == 90 else ("HMMA", "HGMMA")
        assert binary.instructions(matrix) and not binary.instructions(other)


ATTENTION = {"decode": compile_decode, "prefill": compile_prefill}
# Llama 3, Qwen 2.5, Gemma-like, OPT and Phi-3 shapes.
USUAL = [(90, 128, 4), (90, 64, 7), (90, 256, 2), (90, 80, 1), (80, 128, 4), (80, 96, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize(("arch", "head_dim", "group"), USUAL)
def test_attention(phase: str, arch: int, head_dim: int, group: int) -> None:
    ATTENTION[phase](arch, head_dim, group, torch.bfloat16, torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize(
    ("arch", "head_dim", "group", "features"),
    [
        (90, 128, 4, {"window": 4096}),
        (90, 256, 2, {"softcap": 50.0}),
        (80, 256, 2, {"softcap": 50.0}),
        (80, 64, 8, {"window": 128, "sinks": meta(64, dtype=torch.float32)}),
        (90, 128, 5, {"chunk": 8192}),
    ],
    ids=["mistral", "gemma-90", "gemma-80", "gpt-oss", "llama-4"],
)
def test_attention_with_features(phase: str, arch: int, head_dim: int, group: int, features: dict[str, Any]) -> None:
    ATTENTION[phase](arch, head_dim, group, torch.bfloat16, torch.int32, **features)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ATTENTION)
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_of_every_shape(phase: str, arch: int, head_dim: int, dtype: torch.dtype) -> None:
    groups = range(1, 9) if dtype == torch.bfloat16 else [7]
    for group in groups:
        ATTENTION[phase](arch, head_dim, group, dtype, torch.int32)
    ATTENTION[phase](arch, head_dim, 4, dtype, torch.int64)


def check_wide_access(binary: Code) -> None:
    """Reads and writes of the bulk of the data take 16 bytes a thread."""
    assert any(load.endswith(".128") for load in binary.instructions("LDG")), binary.instructions("LDG")
    assert any(store.endswith(".128") for store in binary.instructions("STG")), binary.instructions("STG")


@pytest.mark.parametrize("arch", mostly_slow([90, 80], [90]))
@pytest.mark.parametrize(
    ("head_dim", "rotary", "heads", "norm"),
    [(128, 128, 32, False), (128, 128, 16, True), (80, 20, 32, False), (64, 0, 12, False)],
)
def test_rope_and_cache_write(arch: int, head_dim: int, rotary: int, heads: int, norm: bool) -> None:
    tokens = meta(512, (heads + 16) * head_dim).unflatten(1, (heads + 16, head_dim))
    q, k, v = tokens.split([heads, 8, 8], dim=1)
    index, table = meta(512, dtype=torch.int32), meta(64, 512, dtype=torch.int32)
    weight = meta(head_dim) if norm else None
    cos_sin = meta(4096, rotary, dtype=torch.float32) if rotary else None
    pool = PoolView(meta(999, 16, 8, head_dim), table, table, 900)
    args = q, k, v, cos_sin, index, index, pool
    (binary,) = launched(arch, rope_cache_write, *args, layer=5, q_norm=weight, k_norm=weight)
    check(binary, arch)
    assert binary.registers <= 96
    check_wide_access(binary)


def wide_launches(width: int) -> list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]]:
    """Norms, activations and copies of rows of this width."""
    x, weight, index = meta(512, width), meta(width), meta(512, dtype=torch.int32)
    cache = x, index, index, meta(999, 16, width // 128, 128), meta(64, 512, dtype=torch.int32)
    place = {"layer": 5, "scratch_base": 900}
    norms: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = [
        (add_rms_norm, (x, x, weight, 1e-5), {}),
        (add_layer_norm, (x, x, weight, weight, 1e-5), {}),
    ]
    if width != 4096:
        return norms
    return [
        *norms,
        (silu_and_mul, (x,), {}),
        (gelu_tanh_and_mul, (x,), {}),
        (hidden_write, cache, place),
        (hidden_gather, cache, place),
        (unit_copy, (x, x, meta(9, 2, dtype=torch.int64)), {}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_norms_activations_and_copies(arch: int, width: int) -> None:
    for function, args, options in wide_launches(width):
        for binary in launched(arch, function, *args, **options):
            check(binary, arch)
            check_wide_access(binary)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "sizes"),
    [
        (80, torch.bfloat16, [(576, 960)]),
        (90, torch.bfloat16, [(4096, 6144), (14336, 4096), (576, 960)]),
        (120, torch.bfloat16, [(14336, 4096)]),
        (90, torch.float32, [(4096, 6144)]),
    ],
)
def test_adapters(arch: int, dtype: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    slots, table = meta(64, dtype=torch.int32), meta(64, 3, dtype=torch.int64)
    for width, outputs in sizes:
        scratch = meta(-(-width // configs.LORA_SPLIT), 256, 192, dtype=torch.float32)
        rows = meta(64, width, dtype=dtype), meta(64, outputs, dtype=dtype)
        binaries = launched(arch, lora_add, *rows, slots, table, scratch)
        assert len(binaries) == 2 and all(each.stack == 0 and each.registers <= 128 for each in binaries)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "width"), [(89, 4096), (90, 896), (90, 14336), (120, 14336)])
def test_rounding_to_floats_of_8_bits(arch: int, width: int) -> None:
    rows, one, weight = meta(64, width), meta(1, dtype=torch.float32), meta(width)
    (rounded,), (scaled,) = launched(arch, round_rows, rows), launched(arch, scale_rows, rows, one)
    assert max(rounded.stack, scaled.stack) == 0 and max(rounded.registers, scaled.registers) <= 64
    assert any(load.endswith(".128") for load in rounded.instructions("LDG"))  # eight values, which become bytes
    assert any(store.endswith(".64") for store in rounded.instructions("STG"))
    for scale in (one, None):
        binaries = launched(arch, silu_and_mul_rounded, meta(64, 2 * width), scale)
        for residual in (rows, None):
            binaries += launched(arch, add_rms_norm_rounded, rows, residual, weight, 1e-5, scale)
        assert len(binaries) == 3 and all(each.stack == 0 for each in binaries)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 120])
def test_unpacking_of_4_bits(arch: int) -> None:
    tiles, places = meta(512, 32, 32, 4, dtype=torch.int32), meta(1024, dtype=torch.int64)
    (binary,) = launched(arch, unpack_tiles, tiles, places, meta(32, 4096, 2))
    assert binary.stack == 0 and binary.registers <= 96


MIXTURES = {
    "Qwen3-30B-A3B": (2048, ExpertSizes(128, 8, 768, normalised=True, rounded=False)),
    "gpt-oss-20b": (2880, ExpertSizes(32, 4, 2880, normalised=True, rounded=True, clamp=(1.702, 7.0))),
}
"""Hidden size and experts."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 120])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("tokens", [64, 4096], ids=["few", "many"])
def test_experts(tokens: int, name: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few and of many rows; where torch would multiply, too."""
    monkeypatch.setattr(configs, "groups_by_torch", lambda _device: False)
    hidden, sizes = MIXTURES[name]
    rows, ends = tokens * sizes.per_token, meta(sizes.total, dtype=torch.int32)
    number, places = meta(rows, dtype=torch.int32), meta(tokens, sizes.per_token, dtype=torch.int32)
    up, down = meta(sizes.total, 2 * sizes.width, hidden), meta(sizes.total, hidden, sizes.width)
    binaries = launched(arch, grouped_product, meta(tokens, hidden), up, ends, number)
    binaries += launched(arch, grouped_product, meta(rows, sizes.width), down, ends)
    assert len(binaries) == 2
    for binary in binaries:
        check(binary, arch)
        check_wide_copies(binary)
        assert binary.instructions("HGMMA" if arch == 90 and tokens > 64 else "HMMA")
    shares = meta(tokens, sizes.per_token, dtype=torch.bfloat16 if sizes.rounded else torch.float32)
    bias, routed = sizes.clamp and meta(sizes.total, hidden), Routing(shares, ends, number, number, places)
    others = launched(arch, route_experts, meta(tokens, sizes.total), sizes)
    others += launched(arch, sum_experts, meta(rows, hidden), bias, routed)
    if sizes.clamp:
        wide = meta(rows, 2 * sizes.width), meta(sizes.total, 2 * sizes.width)
        others += launched(arch, clamped_swiglu, *wide, number, sizes.clamp)
    assert all(each.stack == 0 and each.registers <= 96 for each in others)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [(90, torch.bfloat16), (80, torch.float32)], ids=str)
def test_sampling(arch: int, dtype: torch.dtype) -> None:
    index, floats = meta(64, dtype=torch.int32), meta(64, dtype=torch.float32)
    wishes = meta(64, dtype=torch.float64), floats, index, floats, floats
    history, penalty = meta(64, 128256, dtype=torch.int32), meta(64, 3, dtype=torch.float32)
    logits = meta(64, 128256, dtype=torch.float32)
    binaries = launched(arch, draw, meta(64, 128256, dtype=dtype), index, *wishes)
    binaries += launched(arch, penalise, logits, index, index, history, penalty)
    binaries += launched(
        arch, token_mask, meta(64, 128000), meta(8, dtype=torch.int32), meta(8, 4000, dtype=torch.int32)
    )
    for binary in binaries:
        check(binary, arch)
    (counted,) = launched(arch, count_tokens, history, index, index, index)
    assert counted.stack == 0 and counted.registers <= 16


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "count"), [(90, 256), (80, 1000)])
def test_start_of_a_step(arch: int, count: int) -> None:
    sizes = (8196,), (count, 8), (256, 500), (count,)
    control, base, tables, ids = (meta(*size, dtype=torch.int32) for size in sizes)
    uniform, work = meta(count, dtype=torch.float64), DecodeWork(count, count + 66, 128, META)
    (binary,) = launched(arch, begin_step, control, base, tables, ids, ids, ids, uniform, work)
    check(binary, arch)
    assert binary.registers <= 64


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


def check_launches(arch: int, kernels: set[str], models: list[str]) -> None:
    """Compile the launches of served models. Up to 8 bytes of stack are no spill where registers are free: the compiler
    stops at 64 or 128, so that one more program fits (gpt-oss's prefill with a window on sm_80)."""
    found = [each for each in record(arch, models) if not kernels or each.kernel in kernels]
    assert len(found) >= len(kernels)
    for variant in found:
        code, where = compile_code(variant, arch), f"{variant.kernel}, sm_{arch}"
        assert code.shared <= SHARED_MEMORY[arch] * 1024, where
        assert code.stack == 0 or (code.stack <= 8 and code.registers <= 128), f"{where} spills"


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "model"), [(90, "8B"), (80, "8B int8")])
def test_attention_of_a_served_model(arch: int, model: str) -> None:
    check_launches(arch, {"split_kernel", "prefill_kernel", "merge_kernel"}, [model])


@pytest.mark.manual
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_launch_of_served_models(arch: int) -> None:
    check_launches(arch, set(), list(MODELS))
