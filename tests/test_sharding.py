"""Layers divided among ranks: each has its part and no more, and together they are the whole model; `test_ranks` runs
whole engines of ranks."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import packed_checkpoints
import pytest
import tiny_models
import torch
from test_models import LENGTH, logits_of, tokens_for, worst_error
from torch import Tensor

from engine.errors import ModelLoadError
from engine.execution import memory
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.linear import PlainLinear
from engine.models.sharding import Shard, SummedLinear, SumRanks, divide
from engine.models.spec import load_spec
from engine.models.weights import ModelWeights, matrices

T = TypeVar("T")
WAIT = 120.0  # seconds, until ranks that wait for one that failed give up
INDIVISIBLE = {"llama-gqa3-odd-heads", "qwen2-gqa7"}
OUTPUT = 12


def unjoined(rank: int, ranks: int) -> Shard:
    """For what only loads."""

    def total(_part: Tensor) -> None:
        raise AssertionError("nothing was to run")

    return Shard(rank, ranks, total)


class Meeting:
    """Sums over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=WAIT)
        self._parts: list[Tensor] = [torch.empty(0)] * ranks

    def of(self, rank: int) -> SumRanks:
        def total(part: Tensor) -> None:
            self._parts[rank] = part.clone()
            self._barrier.wait()
            part.copy_(functools.reduce(torch.add, self._parts))
            self._barrier.wait()

        return total

    def at_once(self, calls: list[Callable[[], T]]) -> list[T]:
        """One call on each rank."""

        def guarded(call: Callable[[], T]) -> T:
            try:
                return call()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(guarded, calls))


def part_of(folder: Path, shard: Shard, dtype: str = "auto") -> Decoder:
    whole = load_spec(folder)
    return Decoder(shard.spec_of(whole), load_weights(whole, folder, dtype=dtype, shard=shard))


# Loading --------------------------------------------------------------------------------------------------------------


def refusal(name: str, ranks: int) -> str:
    folder = tiny_models.model_folder(name)
    with pytest.raises(ModelLoadError) as caught:
        load_weights(load_spec(folder), folder, shard=unjoined(0, ranks))
    return caught.value.message


def test_what_cannot_be_divided_is_named() -> None:
    said = "the model's {} cannot be divided among {} ranks"
    assert refusal("llama-gqa3-odd-heads", 2) == said.format("9 attention heads", 2)
    spec = replace(
        load_spec(tiny_models.model_folder("llama-gqa2")), num_heads=12, num_kv_heads=3, intermediate_size=96
    )
    with pytest.raises(ModelLoadError, match="the model's 3 key-value heads cannot be divided among 2 ranks"):
        divide(spec, 2)
    assert divide(spec, 6).num_kv_heads == 1, "of which each is on two ranks"
    assert refusal("llama-gqa3-odd-heads", 3) == said.format("88 inner values of the MLP", 3)


@pytest.mark.parametrize("name", ["llama-gqa2", "phi3", "neox", "opt"])
def test_a_rank_holds_its_part_alone(name: str) -> None:
    folder = tiny_models.model_folder(name)
    whole = load_weights(load_spec(folder), folder).layers
    part = load_weights(load_spec(folder), folder, shard=unjoined(1, 2)).layers
    assert 2 * part.held_bytes == whole.held_bytes
    for layer in part:
        for matrix in matrices(layer):
            weight, _ = matrix.dense_from(0)
            assert weight.untyped_storage().nbytes() == weight.nbytes, "the whole weight is still in memory"


@pytest.mark.parametrize("name", ["llama-gqa2", "llama-mha-tied"])
def test_the_head_is_divided_where_the_vocabulary_can_be(name: str) -> None:
    """And what it takes is known before it is loaded."""
    folder = tiny_models.model_folder(name)

    def beside(parts: Tensor) -> Tensor:
        return torch.cat([parts, parts + 1], dim=-1)

    for vocab in (98, 97):
        spec = replace(load_spec(folder), vocab_size=vocab)
        dummy = functools.partial(load_weights, spec, folder, load_format="dummy", dtype="float32")
        whole = dummy()
        part = dummy(shard=replace(unjoined(1, 2), gather=beside))
        head, full = (each.head.dense_from(0)[0] for each in (part, whole))
        x = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(3))
        logits = Decoder(divide(spec, 2), part).logits(x)
        if vocab == 97:
            assert part.gather is None and torch.equal(head, full) and logits.shape == (3, 97)
        else:
            assert torch.equal(head, full[49:]) and logits.shape == (3, 98)
            torch.testing.assert_close(logits[:, 49:] - 1, Decoder(spec, whole).logits(x)[:, 49:])
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in (head, part.embedding)}
        norms = part.final_norm.weight.nbytes + sum(
            n.weight.nbytes for w in part.layers for n in (w.input_norm, w.post_norm)
        )
        held = part.layers.held_bytes + norms + sum(each.untyped_storage().nbytes() for each in storages.values())
        assert memory.weight_bytes(divide(spec, 2), torch.float32, "none", 2) == held
        rounded = [memory.weight_bytes(divide(spec, 2), torch.float32, "int8", ranks) for ranks in (1, 2)]
        assert rounded[0] - rounded[1] == (vocab - len(head)) * (spec.hidden_size + 8)


def test_parts_of_dummy_weights_are_of_one_model() -> None:
    spec = load_spec(tiny_models.model_folder("llama-gqa2"))

    def load(shard: Shard | None = None) -> ModelWeights:
        return load_weights(spec, Path("/nonexistent"), load_format="dummy", shard=shard)

    parts = [load(unjoined(rank, 2)) for rank in (0, 1)]
    for index, layer in enumerate(load().layers):
        for sized, dim in (("down", 1), ("out", 1)):
            halves = [getattr(part.layers[index], sized).dense_from(0)[0] for part in parts]
            assert torch.equal(torch.cat(halves, dim), getattr(layer, sized).dense_from(0)[0])
        gates, ups = zip(*[part.layers[index].up.dense_from(0)[0].chunk(2) for part in parts], strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), layer.up.dense_from(0)[0])


def test_weights_in_fewer_bits_are_unpacked_and_cut(tmp_path: Path) -> None:
    packed_checkpoints.write(tmp_path, "w8a8")
    spec = load_spec(tmp_path)
    whole = load_weights(spec, tmp_path, dtype="float32").layers
    part = load_weights(spec, tmp_path, dtype="float32", stored=True, shard=unjoined(1, 2)).layers
    for index, layer in enumerate(whole):
        assert torch.equal(part[index].down.dense_from(0)[0], layer.down.dense_from(0)[0].chunk(2, 1)[1])
        assert torch.equal(part[index].up.dense_from(0)[0][:44], layer.up.dense_from(0)[0][44:88])


# Running --------------------------------------------------------------------------------------------------------------


def test_the_bias_is_added_once_behind_the_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((6, 4), (6,), (3, 4)))
    layer = SummedLinear(PlainLinear(weight, None), bias, lambda part: part.mul_(2))
    expected = 2 * x @ weight.t() + bias
    assert (layer.in_features, layer.out_features) == (4, 6)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.outputs_from(2)(x), expected[:, 2:])
    torch.testing.assert_close(layer.on(layer.data().clone())(x), expected)
    assert torch.equal(layer.dense_from(1)[0], weight[1:]) and torch.equal(layer.dense_from(1)[1], bias[1:])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 2) for name in tiny_models.CASES if name not in INDIVISIBLE]
    + [(name, 4) for name in ("llama-mha-tied", "llama-gqa2", "llama-head80-biases", "phi3", "gemma3", "opt", "neox")],
)
def test_ranks_together_are_the_whole_model(name: str, ranks: int) -> None:
    """In chunks. Every rank has the same logits to the last bit, so that any may sample."""
    folder, meeting = tiny_models.model_folder(name), Meeting(ranks)
    parts = [part_of(folder, Shard(rank, ranks, meeting.of(rank))) for rank in range(ranks)]
    chunks = [17, 1, 19, LENGTH - 37]
    found = meeting.at_once([functools.partial(logits_of, part, tokens_for(), chunks) for part in parts])
    spec = load_spec(folder)
    expected = logits_of(Decoder(spec, load_weights(spec, folder)), tokens_for(), chunks)
    assert all(torch.equal(each, found[0]) for each in found)
    assert worst_error(found[0], expected) < 1e-4
