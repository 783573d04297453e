"""A model that copies from its prompt at the speed of a larger one: acceptance as learned, steps as long as real ones.

The packaged model is trained further on tasks of `copying_tasks`, about eight minutes on one core. Its weights are then
laid into a Llama of 134 M parameters whose other weights are zero. Both compute the same function: zero columns of the
embedding shrink the norm's mean square by a constant, which the norm's weight undoes, and further layers write zero.

The folder is kept in the system's temporary folder, so that a second run finds it.
"""

import math
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import copying_tasks
from benchmarks.demo_training.tokenizer import DialogueEncoder
from benchmarks.demo_training.train import WEIGHTS, Settings, fit, packed, save

SETTINGS = Settings(row_lengths=(320, 640), tokens=2048, steps=900, peak_rate=0.005, seed=7)
WIDE = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 9, "intermediate_size": 1536}
LAYERS = 33
"""With these sizes 133 M parameters beside the embedding, as in the model of random weights."""


def widen(small: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a larger model that computes the same logits, up to rounding."""
    values = small.config.to_dict() | WIDE | {"num_hidden_layers": LAYERS}
    large = LlamaForCausalLM(LlamaConfig.from_dict(values))
    shrink = math.sqrt(small.config.hidden_size / large.config.hidden_size)
    found = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            parameter.zero_()
            if (part := found.get(name)) is not None:
                _corner(parameter, part).copy_(part * shrink if "norm" in name else part)
    return large


def _corner(large: Tensor, small: Tensor) -> Tensor:
    return large[tuple(slice(size) for size in small.shape)]


def train() -> LlamaForCausalLM:
    """Train the packaged model further. The result is the same for the same machine and number of threads."""
    torch.manual_seed(SETTINGS.seed)
    model = LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    encoder = DialogueEncoder(PreTrainedTokenizerFast.from_pretrained(WEIGHTS))
    fit(model, packed(copying_tasks.Tasks(SETTINGS.seed), encoder, SETTINGS), SETTINGS, math.inf)
    return model


def copying_model() -> Path:
    """Return the folder of the model; train it if it does not exist."""
    sources = b"".join(path.read_bytes() for path in (Path(copying_tasks.__file__), WEIGHTS / "model.safetensors"))
    key = sha256(sources + repr((SETTINGS, WIDE, LAYERS)).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"tidemill-copying-{os.getuid()}-{key}"
    if not folder.is_dir():
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            made = Path(name) / "model"
            shutil.copytree(WEIGHTS, made)
            save(widen(train()), made)
            made.rename(folder)
    return folder
