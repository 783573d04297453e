"""What every kernel that a served step launches compiles to, for seven architectures; no GPU is needed.

The launches are recorded on the dry device: the shapes of real models (two layers of each), every kind of step, the
cache in 8 bits, windows, softcaps, graphs and none. Each is compiled as Triton's own front end asks for it. `python
tests/kernel_ledger.py` writes docs/develop/kernels.md anew (minutes); tests/test_kernel_ledger.py compares.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from dry_device import META, dry_device
from test_cuda_runner import MetaTensors
from test_dry_device import LAUNCHING, Masks, counts_of, kinds_of, launches_of
from tiny_models import model_folder
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.setup import SHAPES
from engine.execution.cuda.buffers import HeadSizes
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernels import triton_kernels
from engine.execution.cuda.modules import KernelAttention
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.models.byte_cells import INTEGERS
from engine.models.float8 import FLOAT8, Float8Linear, Rounding
from engine.models.linear import MakeLinear, make_linear
from engine.models.spec import hidden_offer, load_spec, spec_from_config
from engine.models.weights import build_weights
from engine.triton_kernels.round_rows import round_rows, scale_rows
from predictor.limits import Limits

ARCHS = (80, 86, 89, 90, 100, 103, 120)
PAGE = Path(__file__).parents[1] / "docs" / "develop" / "kernels.md"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KB that a program may have."""
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
"""Shapes, and the 8 bits that K and V are kept in, if they are. The window is one that the steps here go beyond."""
MODULES = "K wider than V"
"""Not a model of ours: attention of transformers' modules, as DeepSeek-V2 has it."""
MODELS[MODULES] = (SHAPES["8B"], False)
FLOAT8_MODELS = {"8B fp8": False, "8B fp8 static": True}
"""Whose linear layers are of floats of 8 bits, and whether their inputs have stored scales."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with all that decides what it compiles to; picklable."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    warps: int
    stages: int

    @property
    def digest(self) -> str:
        """Tells it from the other variants; the same under every version of Triton."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]


class Binary(NamedTuple):
    """What came out: registers of a thread, bytes of its stack, bytes of shared memory, instructions, and those of the
    longest loop."""

    registers: int
    stack: int
    shared: int
    instructions: int
    loop: int

    def __str__(self) -> str:
        return " / ".join(map(str, self))

    @property
    def spills(self) -> bool:
        """Whether registers were short; a few bytes of stack where few are in use are the compiler's choice."""
        return self.stack > 8 or (self.stack > 0 and self.registers > 64)

    def is_close(self, other: "Binary") -> bool:
        """Within a tenth in everything; the stack, which spills would need, the same."""
        pairs = zip(self, other, strict=True)
        return self.stack == other.stack and all(abs(a - b) <= max(2, 0.1 * max(a, b)) for a, b in pairs)


def record(arch: int, names: Iterable[str] = MODELS) -> dict[Variant, list[str]]:
    """The variants that steps of these models launch on this architecture, and the models of each."""
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
                offered = not hidden_offer(spec).refusal and not cell_type
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
    pool = UnitPool(120, num_layers=2, block_size=16, num_kv_heads=16, head_dim=192, dtype=torch.bfloat16, device=META)
    attention = KernelAttention(triton_kernels(), pool, RowTable(limits), limits)
    attention.warm_up(HeadSizes(16, 16, 192, 128))


def _float8(stored: bool) -> MakeLinear:
    def make(weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> Float8Linear:
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


def compile_variant(variant: Variant, arch: int) -> Binary:
    """Compile it, and read the machine code."""
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
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)
    jumps = [(int(at, 16), re.search(r"\bBRA\S*\s+(?:\S+,\s+)?`?\(?0x([0-9a-f]+)", text)) for at, text in code]
    loops = [(at - int(jump[1], 16)) // 16 + 1 for at, jump in jumps if jump and int(jump[1], 16) < at]
    return Binary(int(registers[1]), int(registers[2]), compiled.metadata.shared, len(code), max(loops, default=0))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def measure(archs: Iterable[int] = ARCHS) -> tuple[dict[Variant, list[str]], dict[tuple[Variant, int], Binary]]:
    """Everything recorded and compiled, two at a time."""
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
    """What steps launch, by name and in order."""
    lines = ["| model | step | in a layer | outside of the layers |", "|---|---|---|---|"]
    for name in LAUNCHING:
        for step, tokens in (("decodes", 2), ("decodes and prompts", 20)):
            cells = [f"{len(each)}: {', '.join(map(_operation, each))}" for each in launches_of(name, tokens)]
            lines.append(f"| {load_spec(model_folder(name)).family} | {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _operation(name: str) -> str:
    return f"**{name.removesuffix('_kernel')}**" if name.endswith("_kernel") else name.strip("_")


def write(path: Path = PAGE) -> None:
    users, binaries = measure()
    head = ["kernel", "variant", "models", "warps, stages", *(f"sm_{arch}" for arch in ARCHS)]
    lines = [
        _ABOUT.format(version=triton.__version__, launches=launch_table()),
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for variant in sorted(users, key=lambda each: (each.kernel, each.digest)):
        cells = [str(binaries.get((variant, arch), "")) for arch in ARCHS]
        row = [variant.kernel, variant.digest, ", ".join(users[variant]), f"{variant.warps}, {variant.stages}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    path.write_text("\n".join(lines) + "\n")


def read(path: Path = PAGE) -> tuple[str, dict[tuple[str, int], Binary]]:
    """The version of Triton, and what the page says by variant and architecture."""
    text = path.read_text()
    version = re.search(r"Triton (\S+),", text)
    assert version, "the page does not say its version of Triton"
    found: dict[tuple[str, int], Binary] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 + len(ARCHS) and re.fullmatch("[0-9a-f]{8}", cells[1]):
            for arch, cell in zip(ARCHS, cells[4:], strict=True):
                if cell:
                    found[cells[1], arch] = Binary(*map(int, cell.split("/")))
    return version[1], found


_ABOUT = """# What steps launch, and what the Triton kernels compile to

What the dry device records of a step within a bucket, in order: kernels of ours in bold, operators of torch. A CUDA
graph replays all of them at once. Draws, penalties and masks come behind, where a request wants them.

{launches}

## What the kernels compile to

Made by `python tests/kernel_ledger.py` with Triton {version}, without a GPU: counts of the code, not times. Every
launch of a step of eighteen models (two layers each; d256: heads of 256), and of attention in modules that are not
ours with heads of 192 and 128, as it is served, for each architecture:
registers of a thread / bytes of its stack / bytes of shared memory / instructions / instructions of the longest loop. A
stack where many registers are in use is of those that did not fit, and none may have one. An empty cell: not launched
there, another variant is. Tests fail where a launch is missing here, and where a figure changed by more than a tenth.
"""

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    write()
