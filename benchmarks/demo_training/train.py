"""Trains the packaged demo model: ``python -m benchmarks.demo_training.train [--out DIR]``.

Two processor cores with bfloat16 instructions need a few minutes. The forward and backward passes are transformers'
`LlamaForCausalLM`, so the weights are by construction those of an ordinary Llama. Knows nothing about serving.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_training.copying import set_up_copying
from benchmarks.demo_training.corpus import Corpus, HeldOut
from benchmarks.demo_training.formal import Message
from benchmarks.demo_training.tokenizer import CONTEXT, DialogueEncoder, build_tokenizer, save_tokenizer
from engine.machine.facts import read_processor

WEIGHTS = Path(__file__).parents[2] / "engine" / "models" / "demo" / "weights"


@dataclass(frozen=True)
class Settings:
    """Size of the model and length of the training."""

    hidden: int = 256
    layers: int = 5
    heads: int = 4
    ffn: int = 576
    row_lengths: tuple[int, ...] = (128, 256, 640, CONTEXT)  # a dialogue goes into the shortest row that holds it
    tokens: int = 4096  # per step
    steps: int = 1500
    peak_rate: float = 0.015  # matrices, Muon; the embedding takes a fifth of it, AdamW
    vocabulary_dialogues: int = 6000
    seed: int = 0


def new_model(settings: Settings, vocab_size: int, end: int, pad: int) -> LlamaForCausalLM:
    """A Llama with full multi-head attention, whose hidden state is half the size of its keys and values."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        intermediate_size=settings.ffn,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    set_up_copying(model)
    return model


@dataclass(frozen=True)
class Batch:
    """Packed rows: ids, positions that restart at every dialogue, weights in the loss; all [rows, length]."""

    ids: Tensor
    positions: Tensor
    weights: Tensor


class Dialogues(Protocol):
    """A source of dialogues without end."""

    def dialogues(self) -> Iterator[list[Message]]: ...


def examples(corpus: Dialogues, encoder: DialogueEncoder, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Encoded dialogues, with a drill now and then: random tokens said twice, which keeps the copying circuit alive."""
    drill, vocab_size = random.Random(seed), len(encoder.tokenizer)
    for messages in corpus.dialogues():
        yield encoder.encode(messages)
        if drill.random() < 0.1:
            run = [drill.randrange(3, vocab_size) for _ in range(drill.randint(3, 30))]
            yield run + run, [False] * (len(run) + 1) + [True] * (len(run) - 1)


def packed(corpus: Dialogues, encoder: DialogueEncoder, settings: Settings) -> Iterator[Batch]:
    """Batches without end, each of rows of one length: attention over short rows costs far less."""
    pools: dict[int, list[list[tuple[list[int], list[bool]]]]] = {length: [] for length in settings.row_lengths}
    for ids, learn in examples(corpus, encoder, settings.seed):
        length = next((n for n in settings.row_lengths if len(ids) <= n), 0)
        if not length:
            continue
        rows = pools[length]
        room = [n for n, row in enumerate(rows) if sum(len(part[0]) for part in row) + len(ids) <= length]
        if room:
            rows[room[0]].append((ids, learn))
        elif len(rows) < max(1, settings.tokens // length):
            rows.append([(ids, learn)])
        else:
            yield _batch(rows, length)
            rows[:] = [[(ids, learn)]]


def _batch(rows: list[list[tuple[list[int], list[bool]]]], length: int) -> Batch:
    shape = (len(rows), length)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    weights = torch.zeros(shape)
    for r, row in enumerate(rows):
        at = 0
        for part, wanted in row:
            end = at + len(part)
            ids[r, at:end] = torch.tensor(part)
            positions[r, at:end] = torch.arange(len(part))
            weights[r, at:end] = _weights(wanted)
            at = end
        positions[r, at:] = torch.arange(length - at)
    return Batch(ids, positions, weights)


def _weights(learn: list[bool]) -> Tensor:
    """1/sqrt(length) for each token of an answer: long texts must not drown the short answers."""
    weights = torch.zeros(len(learn))
    at = 0
    for wanted, run in itertools.groupby(learn):
        length = len(list(run))
        weights[at : at + length] = wanted / math.sqrt(length)
        at += length
    return weights


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Weighted mean cross-entropy; logits are computed only where there is something to learn."""
    hidden = model.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
    weights, ids = batch.weights[:, 1:].flatten(), batch.ids[:, 1:].flatten()
    wanted = weights.nonzero().flatten()
    # few different shapes: the matrix library keeps memory for every shape that it has met
    wanted = nn.functional.pad(wanted, (0, -len(wanted) % 512))
    share = weights[wanted]
    share[int((weights > 0).sum()) :] = 0
    logits = model.lm_head(hidden[:, :-1].flatten(0, 1)[wanted])
    losses = nn.functional.cross_entropy(logits.float(), ids[wanted], reduction="none")
    return (losses * share).sum() / share.sum()


def optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs far fewer steps), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    muon = torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, momentum=0.95)
    return [muon, torch.optim.AdamW(others, lr=peak / 5, weight_decay=0.0, betas=(0.9, 0.98))]


def _rate(progress: float) -> float:
    """Share of the peak rate: a short warm-up, then a cosine to nothing."""
    return min(1.0, progress / 0.02) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def fit(model: LlamaForCausalLM, batches: Iterator[Batch], settings: Settings, minutes: float) -> None:
    """Train for ``settings.steps`` steps, or for ``minutes`` where that is shorter (the schedule follows either)."""
    both = optimizers(model, settings.peak_rate)
    peaks = [group["lr"] for o in both for group in o.param_groups]
    start = time.monotonic()
    fast_halves = read_processor().is_fast("bfloat16")
    model.train()
    for step in itertools.count():
        progress = max(step / settings.steps, (time.monotonic() - start) / (60 * minutes))
        if progress >= 1:
            break
        for group, peak in zip((g for o in both for g in o.param_groups), peaks, strict=True):
            group["lr"] = peak * max(_rate(progress), 1e-3)
        batch = next(batches)
        # short rows: plain products are several times faster than the fused kernel's backward pass
        model.set_attn_implementation("eager" if batch.ids.shape[1] <= 256 else "sdpa")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_halves):
            loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Muon multiplies in bfloat16, which takes ten times as long as the rest of a step if the processor emulates it
        with nullcontext() if fast_halves else patch.object(Tensor, "bfloat16", Tensor.clone):
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - start:6.1f} s", flush=True)
    model.set_attn_implementation("sdpa")
    model.eval()


@torch.inference_mode()
def greedy_matches(model: LlamaForCausalLM, encoder: DialogueEncoder, tests: list[HeldOut]) -> list[bool]:
    """For each test: are the greedy answers exactly the expected ones? One forward pass of all of it decides it."""
    found = []
    for test in tests:
        ids, learn = encoder.encode(test.messages)
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1)
        wanted = torch.tensor(learn)[1:]
        found.append(bool((best[:-1][wanted] == torch.tensor(ids)[1:][wanted]).all()))
    return found


def report(model: LlamaForCausalLM, encoder: DialogueEncoder, tests: list[HeldOut]) -> str:
    """A table: held-out questions answered exactly as expected, per category."""
    table: dict[str, list[bool]] = defaultdict(list)
    for test, right in zip(tests, greedy_matches(model, encoder, tests), strict=True):
        table[test.category].append(right)
    table["all"] = [right for rows in list(table.values()) for right in rows]
    lines = ((name, sum(rows), len(rows)) for name, rows in table.items())
    return "\n".join(f"{name:16s} {right:4d} of {asked:4d}  {right / asked:7.1%}" for name, right, asked in lines)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["name"] = "tidemill-demo"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _first_weights(settings: Settings, encoder: DialogueEncoder, start: Path | None) -> LlamaForCausalLM:
    if start is None:
        return new_model(settings, len(encoder.tokenizer), encoder.end, encoder.tokenizer.pad_token_id)
    return LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)


def train(
    folder: Path, settings: Settings, minutes: float = math.inf, questions: int = 1500, start: Path | None = None
) -> str:
    """Make the whole model folder, from nothing or from the weights and the vocabulary in ``start``; returns the
    closing table."""
    torch.manual_seed(settings.seed)
    folder.mkdir(parents=True, exist_ok=True)
    if start is None:
        sample = itertools.islice(Corpus(settings.seed).dialogues(), settings.vocabulary_dialogues)
        vocabulary = build_tokenizer(m["content"] for dialogue in sample for m in dialogue)
    else:
        vocabulary = Tokenizer.from_file(str(start / "tokenizer.json"))
    save_tokenizer(vocabulary, folder)
    encoder = DialogueEncoder(PreTrainedTokenizerFast.from_pretrained(folder))
    model = _first_weights(settings, encoder, start)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(encoder.tokenizer)} tokens", flush=True)
    fit(model, packed(Corpus(settings.seed + 1), encoder, settings), settings, minutes)
    save(model, folder)
    corpus = Corpus(settings.seed + 2)
    return report(model.float(), encoder, [*corpus.tests(questions), *corpus.tests_of_fixed_form(questions // 10)])


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the packaged demo model tidemill-demo.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="folder to write (default: the packaged one)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time at the latest")
    parser.add_argument("--start", type=Path, help="go on from this model's weights, with its vocabulary")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--rate", type=float, default=Settings.peak_rate, help="lower where weights are gone on from")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="another one to go on with other dialogues")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = Settings(steps=options.steps, peak_rate=options.rate, seed=options.seed)
    print(train(options.out, settings, options.minutes, start=options.start))


if __name__ == "__main__":
    main()
