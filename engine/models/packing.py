"""Storage formats of quantized linear layers, read from config.json; torch-free.

Tensors, not the config, show which layers are quantized. Unsupported formats are refused here, before any tensor is
read. `engine.models.checkpoint` unpacks the weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelLoadError

WORDS, AWQ, GPTQ, SCALED, EXPERTS = "words", "awq", "gptq", "scaled", "experts"
NVFP4, NVFP4_WORDS = "nvfp4", "nvfp4 words"
MX_GROUP = 32
"""Number of MXFP4 values that share a power of two."""
SETTINGS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that hold the settings of quantized layers if config.json does not."""
_WORD = 32  # bits
_INACTIVE = ("none", "dense", "", None)


@dataclass(frozen=True, slots=True)
class Packing:
    """Storage format of quantized linear layers.

    Attributes:
        layout: WORDS (compressed-tensors: integers in words along the inputs), AWQ or GPTQ (words, and scales [groups,
            outputs]), SCALED (one byte per value), EXPERTS (MXFP4: all experts of a layer in one tensor, two values
            per byte, each group with a power of two), or NVFP4 (two values per byte, a scale of 8 bits for each group
            and a factor for all) by the names of modelopt or, NVFP4_WORDS, of compressed-tensors.
        block: Number of outputs and of inputs that share a scale; 0: all.
        shift: Added to stored zero points.
        integers: Made for products of 8-bit integers, with one scale per output.
        in_float: Values and scales are multiplied in float32 for every type of scales.
        floats: Made for products of 8-bit floats (e4m3), with one scale per output.
        blocks: Made for products of 8-bit floats (e4m3), with one scale per block of outputs and inputs.
        static: Inputs have one stored scale instead of a scale per token.
        shuffled: Groups are not of consecutive inputs (act-order).
    """

    name: str
    layout: str
    bits: int
    block: tuple[int, int]
    zero_points: bool = False
    shift: int = 0
    integers: bool = False
    in_float: bool = False
    floats: bool = False
    blocks: bool = False
    static: bool = False
    shuffled: bool = False

    @property
    def nibbles(self) -> bool:
        """Whether layers can compute with the stored 4 bits."""
        groups = self.block[0] == 1 and self.block[1] % MX_GROUP == 0
        return self.bits == 4 and not self.small_floats and groups and not self.shuffled

    @property
    def small_floats(self) -> bool:
        """Whether values are 4-bit floats (e2m1), with a scale per output and group of inputs."""
        return self.layout in (EXPERTS, NVFP4, NVFP4_WORDS)

    @property
    def computes(self) -> bool:
        """Whether some layers can compute with the stored bits."""
        return self.integers or self.floats or self.nibbles or self.blocks or self.small_floats

    def check(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """Raise ModelLoadError if layers of these widths cannot be divided into groups or words."""
        group = self.block[1] if self.block[0] == 1 else 0
        for width in inputs:
            if group and width % group:
                raise ModelLoadError(f"{self.name}: {width} inputs cannot be divided into groups of {group}")
        per_word = _WORD // self.bits
        for width in (*inputs, *outputs) if self.layout in (AWQ, GPTQ) else ():
            if width % per_word:
                raise ModelLoadError(f"{self.name}: {width} values cannot be divided into words of {per_word}")


def packing_from_config(config: Mapping[str, Any]) -> Packing | None:
    """Read `quantization_config`; None without one. Raises ModelLoadError for an unsupported format."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    reader = _METHODS.get(str(method))
    if reader is None:
        named = method or "an unknown method"
        known = ", ".join(sorted(_METHODS))
        raise ModelLoadError(f"weights quantized by {named} are not supported (supported: {known})")
    return reader(given)


def settings_beside(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a file of SETTINGS_FILES as a `quantization_config`; AWQ and GPTQ tools omit the method."""
    if isinstance(given.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **given}
    method = "awq" if given.keys() & {"w_bit", "q_group_size", "zero_point"} else "gptq"
    return {"quant_method": method, "group_size": given.get("q_group_size"), **given}


def _awq(given: Mapping[str, Any]) -> Packing:
    bits, group = _integer("awq", given, "bits", given.get("w_bit")), _integer("awq", given, "group_size", -1)
    version = str(given.get("version") or "gemm").lower()
    if version != "gemm":
        raise ModelLoadError(f"awq version {version!r} is not supported (supported: gemm)")
    _require("awq", bits == 4, f"{bits} bits", "4")
    _require("awq", given.get("zero_point", True) is not False, "zero_point false", "true")
    return Packing(f"AWQ int{bits}{_in_groups(group)}", AWQ, bits, _group("awq", group), zero_points=True)


def _gptq(given: Mapping[str, Any]) -> Packing:
    bits, group = _integer("gptq", given, "bits"), _integer("gptq", given, "group_size", -1)
    stored = str(given.get("checkpoint_format") or "gptq")
    _require("gptq", stored in ("gptq", "gptq_v2"), f"checkpoint_format {stored!r}", "gptq, gptq_v2")
    _require("gptq", bits in (4, 8), f"{bits} bits", "4, 8")
    rules = given.get("dynamic") or {}
    others = [rule for rule, change in rules.items() if change and not rule.startswith("-:")]
    if others:
        raise ModelLoadError(f"gptq with other settings for some layers ({others[0]!r} in 'dynamic') is not supported")
    shift = 1 if stored == "gptq" else 0
    name = f"GPTQ int{bits}{_in_groups(group)}"
    shuffled = given.get("desc_act") is True
    return Packing(name, GPTQ, bits, _group("gptq", group), zero_points=True, shift=shift, shuffled=shuffled)


def _fp8(given: Mapping[str, Any]) -> Packing:
    kind = str(given.get("fmt") or "e4m3")
    _require("fp8", kind == "e4m3", f"values in {kind}", "e4m3")
    block = given.get("weight_block_size")
    if block is None:
        static = given.get("activation_scheme") == "static"
        return Packing("FP8", SCALED, 8, (0, 0), in_float=True, floats=True, static=static)
    pair = _pair("fp8", block)
    return Packing(f"FP8 in blocks of {pair[0]}x{pair[1]}", SCALED, 8, pair, in_float=True, blocks=True)


def _modelopt(given: Mapping[str, Any]) -> Packing:
    found: Mapping[str, Any] = given["quantization"] if isinstance(given.get("quantization"), Mapping) else given
    kind = str(found.get("quant_algo"))
    if kind == "FP8":
        return Packing("modelopt FP8", SCALED, 8, (0, 0), in_float=True, floats=True, static=True)
    _require("modelopt", kind == "NVFP4", f"quant_algo {kind!r}", "FP8, NVFP4")
    return Packing("modelopt NVFP4", NVFP4, 4, _group("modelopt", _integer("modelopt", found, "group_size", 16)))


def _mxfp4(_given: Mapping[str, Any]) -> Packing:
    return Packing("MXFP4", EXPERTS, 4, (1, MX_GROUP))


def _compressed(given: Mapping[str, Any]) -> Packing:
    method, groups = "compressed-tensors", given.get("config_groups")
    kinds = [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []
    if not kinds or not isinstance(kinds[0].get("weights"), Mapping):
        raise ModelLoadError(f"{method} without a scheme of weights in 'config_groups' is not supported")
    first = kinds[0]
    stored = str(first.get("format") or given.get("format"))
    same = all(each.get("weights") == first["weights"] and each.get("format") == first.get("format") for each in kinds)
    _require(method, same, "more than one scheme of weights", "one")
    for extra, key in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        if (given.get(extra) or {}).get(key) not in (*_INACTIVE, {}):
            raise ModelLoadError(f"{method} with a {extra} is not supported")
    scheme = first["weights"]
    bits, kind = _integer(method, scheme, "num_bits"), str(scheme.get("type") or "int")
    if stored == "nvfp4-pack-quantized":
        _require(method, (kind, bits) == ("float", 4), f"{kind}{bits} in {stored}", "float4")
        return Packing(f"{method} NVFP4", NVFP4_WORDS, 4, _group(method, _integer(method, scheme, "group_size", 16)))
    if stored == "pack-quantized":
        _require(method, kind == "int" and bits in (4, 8), f"{kind}{bits} in pack-quantized", "int4, int8")
        layout = WORDS
    else:
        others = ("int-quantized", "float-quantized", "naive-quantized")
        read = ", ".join(("pack-quantized", *others, "nvfp4-pack-quantized"))
        _require(method, stored in others, f"format {stored!r}", read)
        _require(method, bits == 8, f"{kind} of {bits} bits in {stored}", "8")
        layout = SCALED
    block = _strategy(scheme)
    symmetric = scheme.get("symmetric") is not False
    _require(method, kind in ("int", "float") and (symmetric or kind == "int"), f"{kind} with zero points", "int")
    inputs = first.get("input_activations")
    alike = isinstance(inputs, Mapping) and inputs.get("num_bits") == 8 and inputs.get("type", "int") == kind
    whole = layout == SCALED and symmetric and alike and block in ((0, 0), (1, 0))
    integers, floats = whole and kind == "int", whole and kind == "float"
    static = floats and isinstance(inputs, Mapping) and not inputs.get("dynamic", False)
    values = f"{'FP' if kind == 'float' else 'int'}{bits}"
    grouped = _in_groups(block[1]) if block[0] == 1 else ""
    name = f"compressed-tensors {'W8A8 ' if integers else ''}{values}{grouped}"
    return Packing(
        name, layout, bits, block, zero_points=not symmetric, integers=integers, floats=floats, static=static,
        blocks=layout == SCALED and kind == "float" and min(block) > 1,
        shuffled=scheme.get("actorder") in ("group", True),
    )  # fmt: skip


def _strategy(scheme: Mapping[str, Any]) -> tuple[int, int]:
    method, strategy, group = "compressed-tensors", scheme.get("strategy"), scheme.get("group_size")
    if strategy is None:  # the default of compressed-tensors
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "group":
        return _group(method, _integer(method, scheme, "group_size"))
    if strategy == "block":
        return _pair(method, scheme.get("block_structure"))
    _require(method, strategy in ("tensor", "channel"), f"strategy {strategy!r}", "tensor, channel, group, block")
    return (0, 0) if strategy == "tensor" else (1, 0)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}


def _group(method: str, size: int) -> tuple[int, int]:
    if size == -1:
        return 1, 0
    _require(method, size > 0 and size % 8 == 0, f"group_size {size}", "-1, or a multiple of 8")
    return 1, size


def _in_groups(size: int) -> str:
    return f" in groups of {size}" if size > 0 else ""


def _pair(method: str, value: object) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int and each > 0 for each in value):
        return int(value[0]), int(value[1])
    raise ModelLoadError(f"{method} with blocks of {value!r} is not supported (supported: two positive integers)")


def _integer(method: str, given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelLoadError(f"{method} with {key} {value!r} is not supported (supported: an integer)")
    return value


def _require(method: str, condition: bool, found: str, read: str) -> None:
    if not condition:
        raise ModelLoadError(f"{method} with {found} is not supported (supported: {read})")
