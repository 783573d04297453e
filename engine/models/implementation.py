"""Whose layers run a checkpoint: ours, where the family is ours, or transformers' modules. Torch-free until the latter.

`--model-impl` says auto, own or transformers.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.spec import ModelShape, load_spec

OWN, TRANSFORMERS = "own", "transformers"


@dataclass(frozen=True, slots=True)
class Choice:
    """`implementation`: OWN or TRANSFORMERS, and `why`, in words."""

    shape: ModelShape
    implementation: str
    why: str


def choose(folder: Path, wish: str) -> Choice:
    """The model in `folder` by the implementation that `wish` (auto, own, transformers) leaves. Errors: ModelLoadError,
    one line."""
    if wish == TRANSFORMERS:
        return Choice(_foreign(folder), TRANSFORMERS, "asked for")
    try:
        own = load_spec(folder)
    except ModelLoadError as error:
        if wish == OWN or not (folder / "config.json").is_file():
            raise
        return Choice(_instead(folder, error), TRANSFORMERS, "no family of ours")
    return Choice(own, OWN, f"the family {own.family} is ours")


def _instead(folder: Path, own: ModelLoadError) -> ModelShape:
    """transformers' model where ours refuses; an error says why neither runs it."""
    try:
        return _foreign(folder)
    except ModelLoadError as error:
        if error.message == own.message:
            raise own from None
        raise ModelLoadError(
            f"{own.message}; nor by transformers: {error.message.removeprefix(f'{folder}: ')}"
        ) from None


def _foreign(folder: Path) -> ModelShape:
    shape: ModelShape = importlib.import_module("engine.models.transformers_model").load_shape(folder)
    return shape
