"""Compile every kernel that a served step launches, for seven architectures and without a GPU.

The dry device records the launches: shapes of real models (two layers each), every kind of step, 8-bit caches,
windows, softcaps, with and without graphs. Triton's own front end compiles them. `python tests/kernel_ledger.py`
(minutes) writes tests/kernel_ledger.json and the tables of docs/develop/kernels.md; a test compares them.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from devices import pool_of
from dry_device import META, dry_device
from test_cuda_runner import MetaTensors
from test_dry_device import LAUNCHING, Masks, counts_of, kinds_of, launches_of
from tiny_models import model_folder
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.setup import SHAPES
from engine.execution.cuda.buffers import HeadSizes
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.modules import KernelAttention
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models.byte_cells import INTEGERS
from engine.models.float8 import FLOAT8, Float8Linear, Rounding
from engine.models.linear import AnyWeight, MakeLinear, make_linear
from engine.models.spec import hidden_state_refusal, load_spec, spec_from_config
from engine.models.weights import build_weights
from engine.triton_kernels import triton_kernels
from engine.triton_kernels.round_rows import round_rows, scale_rows

ARCHS = (80, 86, 89, 90, 100, 103, 120)
LEDGER = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "develop" / "kernels.md"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory of a program, KB."""
_D256 = SHAPES["8B"] | {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
MODELS: dict[str, tuple[dict[str, object], torch.dtype | None]] = {
    "8B": (SHAPES["8B"], None),
    "0.5B": (SHAPES["Qwen2.5-0.5B"], None),
    "0.6B": (SHAPES["Qwen3-0.6B"], None),
    "8B int8": (SHAPES["8B"], INTEGERS),
    "0.5B int8": (SHAPES["Qwen2.5-0.5B"], INTEGERS),
    "d256": (_D256, None),
    "d256 int8": (_D256, INTEGERS),
    "window": (
        SHAPES["8B"] | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
        None,
    ),
    "gemma2": (
        SHAPES["8B"]
        | {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "head_dim": 256,
            "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 64, "tie_word_embeddings": True,
        },
        None,
    ),
    "1.3B": (
        {
            "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 2048, "word_embed_proj_dim": 2048,
            "ffn_dim": 8192, "num_attention_heads": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
            "activation_function": "relu",
        },
        None,
    ),
    "8B fp8": (SHAPES["8B"], None),
    "8B fp8 static": (SHAPES["8B"], None),
}  # fmt: skip
"""Config of each model, and the cell type of an 8-bit cache. The recorded steps go beyond the sliding window."""
MODULES = "K wider than V"
"""Attention of transformers' modules with the head sizes of DeepSeek-V2."""
MODELS[MODULES] = (SHAPES["8B"], False)
FLOAT8_MODELS = {"8B fp8": False, "8B fp8 static": True}
"""Models with FP8 linear layers, and whether the checkpoint stores the scales of their inputs."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with everything that determines its machine code; picklable."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    warps: int
    stages: int

    @property
    def digest(self) -> str:
        """Identify the variant independently of the version of Triton."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]


class Binary(NamedTuple):
    """Registers and bytes of stack of a thread, bytes of shared memory, instructions in all and in the longest loop."""

    registers: int
    stack: int
    shared: int
    instructions: int
    loop: int

    def __str__(self) -> str:
        return " / ".join(map(str, self))

    @property
    def spills(self) -> bool:
        """Return whether registers spill; the compiler may use up to 8 bytes of stack where registers are free."""
        return self.stack > 8 or (self.stack > 0 and self.registers > 64)

    def is_close(self, other: "Binary") -> bool:
        """Return whether all counts are within a tenth and the stacks are equal."""
        pairs = zip(self, other, strict=True)
        return self.stack == other.stack and all(abs(a - b) <= max(2, 0.1 * max(a, b)) for a, b in pairs)


def record(arch: int, names: Iterable[str] = MODELS) -> dict[Variant, list[str]]:
    """Return the variants that steps of these models launch on this architecture, each with its models."""
    found: dict[Variant, list[str]] = {}
    for name in names:
        config, cell_type = MODELS[name]
        if name in FLOAT8_MODELS and arch < 89:
            continue
        spec = spec_from_config(config | {"num_hidden_layers": 2, "vocab_size": 4096, "eos_token_id": None})
        with dry_device(arch) as dry:
            if name == MODULES:
                _attend_in_modules()
            for graphs in () if name == MODULES else (True, False):
                limits = Limits(4, 32, 128, num_units=120, block_size=16)
                with torch.inference_mode():
                    weights = build_weights(
                        spec, _Tensors(), _float8(FLOAT8_MODELS[name]) if name in FLOAT8_MODELS else make_linear
                    )
                offered = not hidden_state_refusal(spec) and not cell_type
                device = CudaDevice(
                    spec, weights, triton_kernels(), limits, graphs=graphs, cell_type=cell_type, host_units=8,
                    scratch_blocks=12 if offered else 0,
                )  # fmt: skip
                runner = Runner(device)
                runner.masks = Masks(spec.vocab_size)  # type: ignore[assignment]
                for kind in kinds_of(spec, int8=cell_type is not None):
                    counts_of(dry, runner, kind)
            for kernel, *asked in dry.variants:
                users = found.setdefault(_variant(kernel, *asked), [])
                if name not in users:
                    users.append(name)
    return found


def _attend_in_modules() -> None:
    limits = Limits(4, 32, 128, num_units=120, block_size=16)
    pool = pool_of(120, 2, 16, 16, 192, torch.bfloat16, META)
    attention = KernelAttention(triton_kernels(), pool, RowTable(limits), limits)
    attention.warm_up(HeadSizes(16, 16, 192, 128))


def _float8(stored: bool) -> MakeLinear:
    def make(weight: AnyWeight, bias: torch.Tensor | None = None, **_gated: bool) -> Float8Linear:
        assert isinstance(weight, torch.Tensor)
        values, ones = weight.new_empty(weight.shape, dtype=FLOAT8), partial(weight.new_ones, dtype=torch.float32)
        inputs = ones(1) if stored else None
        return Float8Linear(values, ones((len(weight), 1)), bias, Rounding(round_rows, scale_rows), inputs)

    return make


class _Tensors(MetaTensors):
    def fetch(self, _name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, device="meta", dtype=torch.bfloat16)


def _variant(
    kernel: Any, signature: Mapping[str, str], _device: int, constants: Any, options: Any, attributes: Any, *_: Any
) -> Variant:
    aligned = sorted(path for path, marks in attributes.items() if ["tt.divisibility", 16] in marks)
    return Variant(
        kernel.fn.__module__, kernel.__name__, tuple(signature.items()), tuple(sorted(constants.items())),
        tuple(aligned), options.num_warps, options.num_stages,
    )  # fmt: skip


class Code(NamedTuple):
    """Machine code of a kernel: registers and bytes of stack of a thread, bytes of shared memory, disassembly."""

    registers: int
    stack: int
    shared: int
    sass: str

    def instructions(self, name: str) -> list[str]:
        """Return all instructions of that name with their modifiers, e.g. LDG.E.128."""
        return re.findall(rf"\b{name}(?:\.[\w.]+)?\b", self.sass)


def compile_code(variant: Variant, arch: int) -> Code:
    """Compile the variant for an architecture."""
    kernel = getattr(import_module(variant.module), variant.kernel)
    attributes = {path: [["tt.divisibility", 16]] for path in variant.divisible}
    source = ASTSource(
        fn=kernel, signature=dict(variant.signature), constexprs=dict(variant.constants), attrs=attributes
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = (_tool("cuobjdump", flag, cubin.name) for flag in ("-res-usage", "-sass"))
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers, usage
    return Code(int(registers[1]), int(registers[2]), compiled.metadata.shared, sass)


def compile_variant(variant: Variant, arch: int) -> Binary:
    """Compile the variant and count its machine code."""
    code = compile_code(variant, arch)
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", code.sass)
    jumps = [(int(at, 16), re.search(r"\bBRA\S*\s+(?:\S+,\s+)?`?\(?0x([0-9a-f]+)", text)) for at, text in lines]
    loops = [(at - int(jump[1], 16)) // 16 + 1 for at, jump in jumps if jump and int(jump[1], 16) < at]
    return Binary(code.registers, code.stack, code.shared, len(lines), max(loops, default=0))


def launched(arch: int, function: Callable[..., object], *args: Any, **kwargs: Any) -> list[Code]:
    """Call a wrapper with meta tensors; return the machine code of its launches."""
    with dry_device(arch) as dry:
        function(*args, **kwargs)
        asked = [_variant(kernel, *rest) for kernel, *rest in dry.variants]
    assert asked, "nothing was launched"
    return [compile_code(variant, arch) for variant in asked]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def measure(archs: Iterable[int] = ARCHS) -> tuple[dict[Variant, list[str]], dict[tuple[Variant, int], Binary]]:
    """Record and compile all variants in two processes."""
    users: dict[Variant, list[str]] = {}
    work: list[tuple[Variant, int]] = []
    for arch in archs:
        for variant, names in record(arch).items():
            users.setdefault(variant, names)
            work.append((variant, arch))
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(partial(_compile_pair), work, chunksize=4))
    return users, dict(zip(work, found, strict=True))


def _compile_pair(pair: tuple[Variant, int]) -> Binary:
    return compile_variant(*pair)


def launch_table() -> str:
    """Return the launches of a step in order, as a Markdown table; models with the same launches share a row."""
    rows: dict[str, list[str]] = {}
    for name in LAUNCHING:
        for step, tokens in (("decodes", 2), ("decodes and prompts", 20)):
            cells = [", ".join(map(_operation, each)) for each in launches_of(name, tokens)]
            rows.setdefault(f"{step} | {' | '.join(cells)}", []).append(load_spec(model_folder(name)).family)
    head = ["| model | step | in a layer | outside of the layers |", "|---|---|---|---|"]
    return "\n".join(head + [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()])


def _operation(name: str) -> str:
    return f"**{name.removesuffix('_kernel')}**" if name.endswith("_kernel") else name.strip("_")


class Entry(NamedTuple):
    """A variant in the ledger."""

    kernel: str
    warps: int
    stages: int
    models: list[str]
    binaries: dict[int, Binary]
    """By architecture; an architecture that launches another variant is absent."""


def summary_table(ledger: Mapping[str, Entry]) -> str:
    """Return the number of variants and the largest figures of each kernel, as a Markdown table."""
    lines = ["| kernel | variants | registers | shared memory, KB | instructions |", "|---|---:|---:|---:|---:|"]
    for kernel in sorted({entry.kernel for entry in ledger.values()}):
        entries = [entry for entry in ledger.values() if entry.kernel == kernel]
        most = [max(column) for column in zip(*(b for entry in entries for b in entry.binaries.values()), strict=True)]
        name = kernel.removesuffix("_kernel")
        lines.append(f"| {name} | {len(entries)} | {most[0]} | {most[2] / 1024:.0f} | {most[3]:,} |")
    return "\n".join(lines)


def write() -> None:
    users, binaries = measure()
    ledger = {
        variant.digest: Entry(
            variant.kernel, variant.warps, variant.stages, users[variant],
            {arch: binaries[variant, arch] for arch in ARCHS if (variant, arch) in binaries},
        )
        for variant in users
    }  # fmt: skip
    save(triton.__version__, ledger)


def save(version: str, ledger: Mapping[str, Entry]) -> None:
    """Write the ledger, a variant a line, and the tables of the page."""
    ordered = sorted(ledger.items(), key=lambda item: (item[1].kernel, item[0]))
    lines = [f"{json.dumps(digest)}: {json.dumps(entry._asdict())}" for digest, entry in ordered]
    LEDGER.write_text(f'{{"triton": {json.dumps(version)}, "variants": {{\n' + ",\n".join(lines) + "\n}}\n")
    text = PAGE.read_text()
    for name, table in (("launches", launch_table()), ("binaries", summary_table(ledger))):
        text, found = re.subn(f"(<!-- {name} -->\n).*?(\n<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
        assert found == 1, f"{PAGE} has no table '{name}'"
    PAGE.write_text(text)


def read() -> tuple[str, dict[str, Entry]]:
    """Return the version of Triton and the entries of the ledger by digest."""
    saved = json.loads(LEDGER.read_text())
    return saved["triton"], {digest: _entry(**fields) for digest, fields in saved["variants"].items()}


def _entry(binaries: Mapping[str, list[int]], **fields: Any) -> Entry:
    return Entry(**fields, binaries={int(arch): Binary(*counts) for arch, counts in binaries.items()})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    write()
