"""Whole models by the native kernels, against transformers and against torch's path: every family, cut into chunks in
any way, in a scattered pool of blocks that held NaN before."""

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import pytest
import torch
from native_build import library_of
from tiny_models import CASES, FAMILY_CASES, model_folder, reference_model
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.native.device import NativeDevice, Sampled
from engine.execution.cpu.native.library import Level, Library, Team
from engine.execution.cpu.native.linear import Native
from engine.limits import Limits
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, load_spec
from engine.models.weights import ModelWeights

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

T = TypeVar("T")
ROWS, LENGTH, VOCAB = 6, 120, 97
FLOAT_ERROR = 3e-5  # of logits near 1, over three layers


@cache
def team_of(library: Library, threads: int) -> Team:
    return Team(library, threads)


class Bench:
    """A native model whose rows hold random tokens, each in blocks scattered over the pool."""

    def __init__(
        self,
        level: Level,
        spec: ModelSpec,
        weights: ModelWeights,
        block_size: int = 16,
        threads: int = 2,
        length: int = LENGTH,
        num_prompt: int = 0,
    ) -> None:
        rng = np.random.default_rng(0)
        library = library_of(level)
        per_row = -(-length // block_size)
        units = 2 * ROWS * per_row
        native = Native(library, level, team_of(library, threads))
        self.model = NativeDevice(Decoder(spec, weights), native, Limits(ROWS, ROWS, length, units, block_size))
        self.pool, self.rows = self.model.pool, self.model.rows
        self.pool.units[:units].fill_(math.nan)
        order = rng.permutation(units)
        for row in range(ROWS):
            self.rows.num_blocks[row] = per_row
            first = 2 * row * per_row
            self.rows.k_table[row, :per_row] = order[first : first + per_row]
            self.rows.v_table[row, :per_row] = order[first + per_row : first + 2 * per_row]
        self.rows.num_prompt[:] = num_prompt
        self.rows.tokens[:] = rng.integers(3, VOCAB, self.rows.tokens.shape)

    def step(self, *chunks: tuple[int, int, int], logits: bool = True) -> Sampled:
        """Chunks (row, start, length); each samples."""
        told = np.array([(*chunk, 1) for chunk in chunks], dtype=np.int64)
        result = self.model.run(told, logits=logits)
        kept = None if result.logits is None else result.logits.clone()
        return Sampled(result.best.copy(), result.best_ids.copy(), kept)

    def ids(self, row: int, length: int) -> list[int]:
        return list(map(int, self.rows.tokens[row, :length]))


def load(name: str, dtype: str = "float32") -> tuple[ModelSpec, ModelWeights]:
    folder = model_folder(name)
    spec = load_spec(folder)
    return spec, load_weights(spec, folder, dtype=dtype)


def transformers_logits(name: str, token_ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = reference_model(name)
    if dtype != torch.float32:
        copy = type(model)(model.config)
        copy.load_state_dict(model.state_dict())
        model = copy.to(dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


CUTS: tuple[tuple[int, ...], ...] = ((60,), (37, 3, 1, 1, 9, 1, 8), (1,) * 20, (7, 8, 15, 16, 1))


def in_turn(names: Iterable[str], *groups: Sequence[T]) -> list[tuple[str, T]]:
    """Each name with every member of one of the groups; families and instruction sets share no code."""
    return [(name, member) for index, name in enumerate(names) for member in groups[index % len(groups)]]


@pytest.mark.parametrize(("name", "level"), in_turn(CASES, [Level.AVX2], [Level.AVX512]))
def test_logits_equal_those_of_transformers(name: str, level: Level) -> None:
    bench = Bench(level, *load(name), block_size=16 if level is Level.AVX512 else 4)
    expected = transformers_logits(name, bench.ids(0, 60))
    for row, cut in enumerate(CUTS):
        bench.rows.tokens[row] = bench.rows.tokens[0]
        end = 0
        for length in cut:
            result = bench.step((row, end, length))
            end += length
            assert result.logits is not None
            error = (result.logits[0] - expected[end - 1]).abs().max()
            assert error < FLOAT_ERROR, f"token {end} of {cut}"
            assert result.best_ids[0] == int(result.logits[0].argmax()) and result.best[0] == result.logits[0].max()


@pytest.mark.parametrize(("name", "level"), in_turn(FAMILY_CASES, [Level.AVX2, Level.AMX], [Level.AVX512, Level.BF16]))
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, level: Level) -> None:
    """Root mean square over 3 rows of 60 tokens; a tenth more is what one draw of rounding errors differs by."""
    bench = Bench(level, *load(name, "bfloat16"))
    ours, theirs = [], []
    for row in range(3):
        ids = bench.ids(row, 60)
        exact = transformers_logits(name, ids)
        theirs.append((transformers_logits(name, ids, torch.bfloat16) - exact)[19:])
        for start, length in [(0, 20), *((at, 1) for at in range(20, 60))]:
            logits = bench.step((row, start, length)).logits
            assert logits is not None
            ours.append(logits[0] - exact[start + length - 1])
    mine, others = (float(torch.cat([e.reshape(-1) for e in each]).square().mean().sqrt()) for each in (ours, theirs))
    assert mine <= 1.1 * others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level", "dtype"),
    [
        ("qwen2-gqa7", Level.AVX2, "float32"),
        ("gemma2", Level.AVX512, "float32"),
        ("llama-gqa2", Level.AVX2, "float16"),
        ("mistral-window", Level.AVX512, "bfloat16"),
        ("llama-gqa2", Level.BF16, "bfloat16"),
        ("qwen2-gqa7", Level.AMX, "bfloat16"),
    ],
)
def test_a_row_has_the_same_bits_in_every_step(name: str, level: Level, dtype: str) -> None:
    """Token by token alone, and in chunks of any length beside others, by any number of threads: logits and cells.

    With products of bfloat16 this holds for tokens of prompts, so that a prompt has one answer, fresh or cached.
    """
    (spec, weights), length = load(name, dtype), 592  # three parts of a context
    sizes = {"length": length, "num_prompt": length}
    alone = Bench(level, spec, weights, threads=1, **sizes)
    expected = [alone.step((0, at, 1)).logits for at in range(length)]
    blocks = length // 16
    cells = [alone.pool.units[table[0, :blocks]] for table in (alone.rows.k_table, alone.rows.v_table)]
    for threads in (1, 2, 5):
        rng = random.Random(threads)
        bench, ends = Bench(level, spec, weights, threads=threads, **sizes), [0] * ROWS
        while ends[0] < length:
            chosen = [min(rng.choice((0, 1, 1, 2, 7, 8, 13, 64, 300)), length - end) for end in ends]
            chunks = [(row, ends[row], count) for row, count in enumerate(chosen) if count]
            rng.shuffle(chunks)
            result = bench.step(*chunks)
            for index, (row, start, count) in enumerate(chunks):
                ends[row] = start + count
                if row == 0:
                    one = expected[start + count - 1]
                    assert one is not None and result.logits is not None and torch.equal(result.logits[index], one[0])
        for table, ours in zip((bench.rows.k_table, bench.rows.v_table), cells, strict=True):
            assert torch.equal(bench.pool.units[table[0, :blocks]], ours)


@pytest.mark.parametrize("level", [Level.BF16, Level.AMX])
def test_neighbours_change_little_where_products_are_of_bfloat16(level: Level) -> None:
    spec, weights = load("llama-gqa2", "bfloat16")
    together, alone = Bench(level, spec, weights), Bench(level, spec, weights, threads=1)
    for bench in (together, alone):
        bench.step(*((row, 0, 20 + row) for row in range(3)))
    chunks = [(0, 20, 1), (1, 21, 5), (2, 22, 30), (3, 0, 70), (4, 0, 8), (5, 0, 1)]
    every = together.step(*chunks)
    for index, chunk in enumerate(chunks):
        single = alone.step(chunk)
        assert every.logits is not None and single.logits is not None
        assert float((every.logits[index] - single.logits[0]).abs().max()) < 0.05


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("where", [5, 40])
def test_a_row_of_nan_ends_itself_alone(level: Level, where: int) -> None:
    """The token 96 has an embedding of NaN; rows beside it, and prefixes before it, are as they are without it."""
    spec, weights = load("llama-gqa2", "bfloat16")
    embedding = weights.embedding.clone()
    embedding[96] = math.nan
    poisoned = dataclasses.replace(weights, embedding=embedding)
    bench, clean = Bench(level, spec, poisoned), Bench(level, spec, weights)
    for each in (bench, clean):
        each.rows.tokens[each.rows.tokens == 96] = 95
        each.rows.tokens[1, where] = 96 if each is bench else 95
    chunks = [(0, 0, 60), (1, 0, 60), (2, 0, 3)]
    mixed, expected = bench.step(*chunks), clean.step(*chunks)
    assert not np.isfinite(mixed.best[1])
    for row in (0, 2):
        assert mixed.logits is not None and expected.logits is not None
        assert torch.equal(mixed.logits[row], expected.logits[row]) and mixed.best[row] == expected.best[row]
    prefix, other = bench.step((1, where, 1)), bench.step((1, where - 1, 1))
    assert not np.isfinite(prefix.best[0])
    assert np.isfinite(other.best[0])


def test_a_step_larger_than_any_before_finds_room() -> None:
    spec, weights = load("llama-gqa2")
    bench = Bench(Level.AVX2, spec, weights)
    expected = bench.step((0, 0, 100)).logits
    bench.model._make_room(4)
    again = bench.step((0, 0, 100)).logits
    assert expected is not None and again is not None and torch.equal(again, expected)


def chunks_of(*chunks: tuple[int, int, int, int]) -> IntArray:
    return np.array(chunks, dtype=np.int64)


def test_chunks_that_do_not_sample_give_nothing() -> None:
    bench = Bench(Level.AVX2, *load("llama-gqa2"))
    nothing = bench.model.run(chunks_of((0, 0, 10, 0), (1, 0, 5, 0)), logits=True)
    assert len(nothing.best) == 0 and nothing.logits is None
    some = bench.model.run(chunks_of((0, 10, 10, 1), (1, 5, 5, 0), (2, 0, 9, 1)), logits=False)
    assert len(some.best_ids) == 2 and some.logits is None
