"""Which norm a module of transformers computes, its epsilon and how it rounds: found by trying it on random rows."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.known_layers import NormForm

_CLOSE = 3e-5  # of the largest value: float32, summed in another order
_MOST_EPSILON = 0.1
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12)  # epsilons that a module without a weight may not hold


class UnknownError(Exception):
    """A module computes something else; a sentence says what was found."""


def read_norm(name: str, module: Any, width: int) -> NormForm:
    """Which norm of so many elements the module is, with a weight or without. Raises UnknownError."""
    weight = getattr(module, "weight", None)
    if any(True for _ in module.parameters()) and (not isinstance(weight, Tensor) or weight.shape != (width,)):
        raise UnknownError(f"{name} is no norm of {width} elements with a weight")
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    rows *= torch.tensor([[1e-3], [1.0], [30.0]])
    expected = module(rows)
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        raise UnknownError(f"{name} is no norm")
    for form in _norm_forms(name, module, width):
        if all(same(mine, each) for mine, each in zip(norm(form, module, rows), expected, strict=True)):
            return _with_rounding(form, module, rows)
    raise UnknownError(f"{name} is another norm")


def norm(form: NormForm, module: nn.Module, x: Tensor) -> Tensor:
    """The norm of x in float32; of an RMS norm in 16 bits, rounded as the form says."""
    weight, bias = form.constants(module)
    wide = x.float()
    if form.layer:
        return functional.layer_norm(wide, weight.shape, weight, bias, form.eps).to(x.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
    return ((normed if form.once else normed.to(x.dtype).float()) * weight).to(x.dtype)


def is_bare_norm(module: nn.Module, width: int) -> bool:
    """Whether it is a norm of so many elements that has no weight."""
    if any(module.children()) or any(True for _ in module.parameters()):
        return False
    try:
        read_norm("", module, width)
    except Exception:
        return False
    return True


def _norm_forms(name: str, module: nn.Module, width: int) -> Iterator[NormForm]:
    bare = 0 if any(True for _ in module.parameters()) else width
    for eps in (each for each in (*floats(module), *(_USUAL if bare else ())) if 0 <= each < _MOST_EPSILON):
        for layer in (False, True):
            if layer or getattr(module, "bias", None) is None:
                for centered in (False,) if bare else (False, True):
                    yield NormForm(name, eps, layer, centered, once=False, bare=bare)


def _with_rounding(form: NormForm, module: nn.Module, rows: Tensor) -> NormForm:
    """The form as it rounds in 16 bits."""
    narrow, few = copy.deepcopy(module).to(torch.bfloat16), rows.to(torch.bfloat16)
    expected = narrow(few)
    forms = [replace(form, once=once) for once in (False, True)]
    return max(forms, key=lambda each: int((norm(each, narrow, few) == expected).sum()))


def floats(module: nn.Module) -> list[float]:
    """Numbers that the module holds, each once."""
    return list(dict.fromkeys(each for each in vars(module).values() if isinstance(each, float)))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether they are one but for the rounding of float32."""
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return False
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    return bool((a - b).abs().max() <= _CLOSE * b.abs().max())
