"""From a folder and a configuration to a model that runs: the one entry point of this package for `engine/build.py`."""

from pathlib import Path

import torch

from engine.models.checkpoint import Checkpoint
from engine.models.families import family_named
from engine.models.linear import MakeLinear, make_linear
from engine.models.spec import ModelSpec
from engine.models.weights import DummyTensors, ModelWeights, build_weights, torch_dtype


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    make: MakeLinear = make_linear,
) -> ModelWeights:
    """Load the checkpoint in `folder`, or with `load_format` "dummy" invent weights of its shape.

    `dtype` "auto" is the checkpoint's own; `make` makes the linear layers. Errors: ModelLoadError, one line that names
    what is missing or wrong.
    """
    kind = torch_dtype(spec.dtype if dtype == "auto" else dtype)
    target = torch.device(device)
    with torch.inference_mode():
        if load_format == "dummy":
            return build_weights(spec, DummyTensors(seed, kind, target), make)
        with Checkpoint(folder, kind, target) as checkpoint:
            weights = build_weights(spec, checkpoint, make)
            copies = tuple(f"{name}.weight" for name in family_named(spec.family).names.head)
            checkpoint.check_all_used(tied_copies=copies if spec.tie_word_embeddings else ())
            return weights
