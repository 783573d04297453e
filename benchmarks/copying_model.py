"""A model that copies from its prompt at the speed of a larger one: acceptance as learned, steps as long as real ones.

The packaged model is trained further on `copying_tasks`, about eight minutes on one core; a quarter of the dialogues
are questions with its own greedy answers, so that it still chats. Its weights are then laid into a Llama of 134 M
parameters whose other weights are zero. Both compute the same function: zero columns of the embedding shrink the norm's
mean square by a constant, which the norm's weight undoes, and further layers write zero.

The folder is kept in the system's temporary folder, so that a second run finds it.
"""

import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import copying_tasks
from benchmarks.live import PACKAGED
from engine.machine.facts import read_processor

STEPS, ROWS, PEAK_RATE, SEED = 900, 8, 0.005, 7
"""Training steps, dialogues of a step, peak learning rate of the layers' matrices (Muon), seed."""
LONGEST = 640
"""Tokens of a dialogue, at most."""
SHARE_OF_CHAT, QUESTIONS = 0.25, 200
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


class Dialogues:
    """Training dialogues: (token ids, ids of the prompt), drawn from the tasks and from answers of the model itself."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(SEED)
        asked = sorted({copying_tasks.question(self._random) for _ in range(QUESTIONS)})
        self._chat = [(text, self._answer(model, text)) for text in asked]

    def draw(self) -> Iterator[tuple[list[int], int]]:
        """Draw dialogues without end. Yield the ids of each, and the length of the prompt."""
        tasks = [*copying_tasks.GROUNDED.values(), copying_tasks.ticket]
        while True:
            if self._random.random() < SHARE_OF_CHAT:
                question, answer = self._random.choice(self._chat)
            else:
                question, answer = self._random.choice(tasks)(self._random)
            prompt = self._prompt(question)
            ids = prompt + self._tokenizer(answer, add_special_tokens=False)["input_ids"]
            if len(ids) < LONGEST:
                yield [*ids, self._tokenizer.eos_token_id], len(prompt)

    def _prompt(self, question: str) -> list[int]:
        asked = [{"role": "user", "content": question}]
        ids: list[int] = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        return ids

    @torch.inference_mode()
    def _answer(self, model: LlamaForCausalLM, question: str) -> str:
        prompt = torch.tensor([self._prompt(question)])
        ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200)
        return str(self._tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True))


def loss_of(model: LlamaForCausalLM, dialogues: list[tuple[list[int], int]]) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens."""
    rows = [torch.tensor(ids) for ids, _ in dialogues]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # causal attention: no answer sees the padding behind it
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    for row, (_, prompt) in zip(labels, dialogues, strict=True):
        row[:prompt] = -100
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def fit(model: LlamaForCausalLM, dialogues: Iterator[tuple[list[int], int]], steps: int) -> float:
    """Train with Muon for the layers' matrices and AdamW for the rest: warm-up, then a cosine. Return the last loss."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers: list[Any] = [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=PEAK_RATE / 5, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    curves = [
        torch.optim.lr_scheduler.LambdaLR(
            each, lambda step: min(1.0, (step + 1) / (0.02 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for each in optimizers
    ]
    fast_halves = read_processor().is_fast("bfloat16")
    model.train()
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_halves):
            loss = loss_of(model, list(islice(dialogues, ROWS)))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Muon multiplies in bfloat16, which takes ten times as long as the rest of a step if the processor emulates it
        with nullcontext() if fast_halves else patch.object(Tensor, "bfloat16", Tensor.clone):
            for each in (*optimizers, *curves):
                each.step()
        model.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    model.eval()
    return loss.item()


def train() -> LlamaForCausalLM:
    """Train the packaged model further. The result is the same for the same machine and number of threads."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM.from_pretrained(PACKAGED, dtype=torch.float32)
    dialogues = Dialogues(model.eval(), PreTrainedTokenizerFast.from_pretrained(PACKAGED))
    fit(model, dialogues.draw(), STEPS)
    return model


def copying_model() -> Path:
    """Return the folder of the model; train it if it does not exist."""
    sources = b"".join(path.read_bytes() for path in (Path(copying_tasks.__file__), PACKAGED / "model.safetensors"))
    key = sha256(sources + repr((STEPS, ROWS, PEAK_RATE, SEED, WIDE, LAYERS)).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"tidemill-copying-{os.getuid()}-{key}"
    if not folder.is_dir():
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            made = Path(name) / "model"
            shutil.copytree(PACKAGED, made)
            widen(train()).to(torch.bfloat16).save_pretrained(made)
            made.rename(folder)
    return folder
