"""Select the implementation of a checkpoint: native layers for supported families, else transformers modules.

Selected by `--model-impl` (auto, own or transformers). Torch-free unless transformers is needed.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.spec import ModelShape, load_spec

OWN, TRANSFORMERS = "own", "transformers"


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected implementation (OWN or TRANSFORMERS) and the reason in words."""

    shape: ModelShape
    implementation: str
    why: str


def choose(folder: Path, wish: str) -> Choice:
    """Select the implementation of the model in `folder` for `wish` (auto, own, transformers).

    Raises ModelLoadError, one line.
    """
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
    """Return the transformers model after the native implementation refused; an error gives both reasons."""
    try:
        return _foreign(folder)
    except ModelLoadError as error:
        if error.message == own.message:
            raise own from None
        raise ModelLoadError(
            f"{own.message}; transformers cannot run it either: {error.message.removeprefix(f'{folder}: ')}"
        ) from None


def _foreign(folder: Path) -> ModelShape:
    shape: ModelShape = importlib.import_module("engine.models.transformers_model").load_shape(folder)
    return shape
