"""Recognise the norm that a transformers module computes, its epsilon and its rounding, by trials on random rows."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.known_layers import NormForm

_CLOSE = 3e-5  # relative to the largest value: float32 sums in another order
_MOST_EPSILON = 0.1
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12)  # candidates for a module without a weight that does not hold its epsilon


class UnknownError(Exception):
    """A module's computation is not recognized; the message describes the computation."""


def read_norm(name: str, module: Any, width: int) -> NormForm:
    """Return the norm of `width` elements that the module computes, with or without weight. Raises UnknownError."""
    weight = getattr(module, "weight", None)
    if any(True for _ in module.parameters()) and (not isinstance(weight, Tensor) or weight.shape != (width,)):
        raise UnknownError(f"{name} is not a norm of {width} elements with a weight")
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    rows *= torch.tensor([[1e-3], [1.0], [30.0]])
    expected = module(rows)
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        raise UnknownError(f"{name} is not a norm")
    for form in _norm_forms(name, module, width):
        if all(same(mine, each) for mine, each in zip(norm(form, module, rows), expected, strict=True)):
            return _with_rounding(form, module, rows)
    raise UnknownError(f"{name} is an unknown norm")


def norm(form: NormForm, module: nn.Module, x: Tensor) -> Tensor:
    """Compute the norm of x in float32; for an RMS norm in 16 bits, rounded as the form says."""
    weight, bias = form.constants(module)
    wide = x.float()
    if form.layer:
        return functional.layer_norm(wide, weight.shape, weight, bias, form.eps).to(x.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
    return ((normed if form.once else normed.to(x.dtype).float()) * weight).to(x.dtype)


def is_bare_norm(module: nn.Module, width: int) -> bool:
    """Return whether the module is a norm of `width` elements without a weight."""
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
    """Return the form with the rounding that the module applies in 16 bits."""
    narrow, few = copy.deepcopy(module).to(torch.bfloat16), rows.to(torch.bfloat16)
    expected = narrow(few)
    forms = [replace(form, once=once) for once in (False, True)]
    return max(forms, key=lambda each: int((norm(each, narrow, few) == expected).sum()))


def floats(module: nn.Module) -> list[float]:
    """Return the distinct float attributes of the module."""
    return list(dict.fromkeys(each for each in vars(module).values() if isinstance(each, float)))


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors agree within float32 rounding, regardless of leading dimensions."""
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return False
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    return bool((a - b).abs().max() <= _CLOSE * b.abs().max())
