"""Compile the kernels that a served step launches, for any architecture and without a GPU.

The dry device records the launches: shapes of real models (two layers each), every kind of step, 8-bit caches,
windows, softcaps, with and without graphs. Triton's own front end compiles them.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
from test_dry_device import Masks, counts_of, kinds_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.setup import SHAPES
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.modules import KernelAttention
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models.attention import HeadSizes
from engine.models.byte_cells import INTEGERS
from engine.models.compact import FLOAT8, Float8Linear, Rounding
from engine.models.linear import AnyWeight, MakeLinear, make_linear
from engine.models.quantized import RoundedWeight
from engine.models.spec import hidden_state_refusal, spec_from_config
from engine.models.weights import build_weights
from engine.triton_kernels import triton_kernels
from engine.triton_kernels.norms import round_rows, scale_rows

ARCHS = (80, 86, 89, 90, 100, 103, 120)
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
    "30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        None,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "intermediate_size": 2880, "sliding_window": 64, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
            "rope_theta": 150000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
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
    """A kernel with everything that determines its machine code."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    warps: int
    stages: int


def record(arch: int, names: Iterable[str] = MODELS) -> set[Variant]:
    """Return the variants that steps of these models launch on this architecture."""
    found: set[Variant] = set()
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
                        spec, Tensors(), _float8(FLOAT8_MODELS[name]) if name in FLOAT8_MODELS else make_linear
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
            found |= {_variant(kernel, *asked) for kernel, *asked in dry.variants}
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
        rounded = RoundedWeight(values, ones((len(weight), 1)), torch.bfloat16, inputs)
        return Float8Linear(rounded, bias, Rounding(round_rows, scale_rows))

    return make


class Tensors(MetaTensors):
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


def launched(arch: int, function: Callable[..., object], *args: Any, **kwargs: Any) -> list[Code]:
    """Call a wrapper with meta tensors; return the machine code of its launches."""
    with dry_device(arch) as dry:
        function(*args, **kwargs)
        asked = [_variant(kernel, *rest) for kernel, *rest in dry.variants]
    assert asked, "nothing was launched"
    return [compile_code(variant, arch) for variant in asked]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
