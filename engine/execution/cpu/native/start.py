"""Selection of the level of the C++ library: the highest whose results for a small model agree with torch."""

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.api import SamplingParams
from engine.errors import ConfigError
from engine.execution.cpu.device import TorchDevice, mix
from engine.execution.cpu.native.attention import NativeAttention
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Library, StepError, Team, load
from engine.execution.cpu.native.linear import Native
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.limits import Limits
from engine.models.attention import PLAIN
from engine.models.byte_cells import INTEGERS
from engine.models.decoder import Decoder
from engine.models.quantized import Int4Linear, make_quantized, pack_weight
from engine.models.spec import ModelSpec, spec_from_config
from engine.models.weights import DummyTensors, ModelWeights, build_weights

logger = logging.getLogger(__name__)

_LENGTH = 44  # tokens: a tile of queries, short chunks, decodes
_CUTS = (33, 4, 1, 1, 5)
_BLOCK = 16
_LIMITS = Limits(1, _LENGTH, _LENGTH, 2 * -(-_LENGTH // _BLOCK), _BLOCK)
_INT4_ERROR = 64  # allowed difference of products near 10, in units of the type's step at 1
_INT8_ERROR = 0.03  # allowed root mean square error of logits near 1 from an 8-bit cache
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 72,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

_GEMMA = _CONFIG | {  # further features: softcaps, a scale, windows with their own theta, branch norms, GeGLU
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 2.0,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 500.0,
    "tie_word_embeddings": True,
}


def start(
    threads: int,
    dtype: torch.dtype,
    found: Library | str | None = None,
    *,
    int8: bool = False,
    int8_cache: bool = False,
) -> Native | str:
    """Return the library at the best level for models of this type, or the reason why steps run in torch.

    `found` is a result of `load`. `int8`: also test 8-bit linear layers. `int8_cache`: also test an 8-bit pool.
    """
    library = load() if found is None else found
    if isinstance(library, str):
        return library
    team = Team(library, threads)
    for level in reversed(library.levels()):
        native = Native(library, level, team)
        if native.level_for(dtype) != level:
            continue
        wrong = self_test(native, dtype)
        wrong = wrong or (self_test(native, dtype, int8_cache=True) if int8_cache else "")
        wrong = wrong or (int8_test(native, dtype) if int8 else "")
        if not wrong:
            return native
        logger.warning("native kernels of level %s are not used: %s", level.name, wrong)
    return "the native kernels fail their test on this processor"


def self_test(native: Native, dtype: torch.dtype, *, int8_cache: bool = False) -> str:
    """Compare logits of small models, run in chunks, and attention alone, with torch. Return the error, or an empty
    string."""
    if wrong := _test_attention(native, dtype):
        return wrong
    specs = (spec_from_config(_CONFIG), replace(spec_from_config(_GEMMA), softcap=1.5))
    return next(filter(None, (_test_model(native, spec, dtype, int8_cache=int8_cache) for spec in specs)), "")


def _test_model(native: Native, spec: ModelSpec, dtype: torch.dtype, *, int8_cache: bool) -> str:
    weights = build_weights(spec, DummyTensors(0, torch.float32, torch.device("cpu")))
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, _LENGTH)
    try:
        decoder = Decoder(spec, _typed(native, spec, dtype))
        cell_type = INTEGERS if int8_cache else None
        logits = _by_chunks(NativeDevice(decoder, native, _LIMITS, cell_type=cell_type), ids)
    except (StepError, ConfigError) as problem:
        return str(problem)
    expected = _by_chunks(TorchDevice(Decoder(spec, weights), _LIMITS), ids)
    error = float((logits - expected).square().mean().sqrt())
    allowed = 2.0 * float(torch.finfo(dtype).eps) * 8 + (_INT8_ERROR if int8_cache else 1e-5)
    return "" if error <= allowed else f"logits differ from those of torch by {error:.1e}"


def _test_attention(native: Native, dtype: torch.dtype) -> str:
    """Test attention with different widths of keys and values, in the same chunks."""
    pool = UnitPool(
        _LIMITS.num_units, num_layers=1, block_size=_BLOCK, num_kv_heads=2, head_dim=64, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    rows = RowTable(_LIMITS)
    _give_blocks(rows)
    attention, generator = NativeAttention(native, pool, rows, _LENGTH), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(_LENGTH, n, d, generator=generator).to(dtype) for n, d in ((4, 64), (2, 64), (2, 32)))
    outputs, at = [], 0
    try:
        for length in _CUTS:
            attention.begin(np.array([[0, at, length, 0]]))
            end = at + length
            outputs.append(attention(0, q[at:end], k[at:end], v[at:end]))
            at = end
    except (StepError, ConfigError) as problem:
        return str(problem)
    bias = torch.full((_LENGTH, _LENGTH), -torch.inf).triu(1)[None, None]
    q, k, v = (part.float().transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    expected = mix(q, k, v, bias, PLAIN)
    error = float((torch.cat(outputs).float() - expected[0].transpose(0, 1).flatten(1)).square().mean().sqrt())
    allowed = 4.0 * float(torch.finfo(dtype).eps) + 1e-5
    return "" if error <= allowed else f"attention differs from that of torch by {error:.1e}"


def int8_test(native: Native, dtype: torch.dtype) -> str:
    """Compare layers of 8 and 4 bits with their torch twins. Return the error, or an empty string."""
    generator = torch.Generator().manual_seed(0)
    for rows, n, k in ((1, 40, 96), (13, 64, 33)):
        x, weight = (torch.randn(count, k, generator=generator).to(dtype) for count in (rows, n))
        if not torch.equal(native.int8_linear(weight)(x), make_quantized(weight)(x)):
            return "products of 8-bit integers differ from those of torch"
        x, packed = torch.cat((x, x.flip(1)), 1)[:, :32], pack_weight(torch.cat((weight, weight), 1)[:, :32])
        error = (native.linear(packed)(x) - Int4Linear(packed, None)(x)).abs().max()
        if not float(error) <= _INT4_ERROR * float(torch.finfo(dtype).eps):
            return "products of 4-bit weights differ from those of torch"
    return ""


def _typed(native: Native, spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Return the same random weights, rounded to a type, in native layers."""

    class Rounded(DummyTensors):
        def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
            return super().fetch(name, shape).to(dtype)

    return build_weights(spec, Rounded(0, torch.float32, torch.device("cpu")), native.linear)


def _by_chunks(device: TorchDevice, ids: np.ndarray) -> Tensor:
    _give_blocks(device.rows)
    device.rows.tokens[0, :_LENGTH] = ids
    device.rows.sampling.write(0, SamplingParams(1))  # by draws, for which a device returns logits
    logits, at = [], 0
    with torch.inference_mode():
        for length in _CUTS:
            logits.append(device.forward(np.array([[0, at, length, 1]]))[0][0].clone())
            at += length
    return torch.stack(logits)


def _give_blocks(rows: RowTable) -> None:
    """Give all units to the first row."""
    blocks = _LIMITS.num_units // 2
    rows.num_blocks[0] = blocks
    rows.k_table[0, :blocks], rows.v_table[0, :blocks] = np.arange(blocks), np.arange(blocks) + blocks
