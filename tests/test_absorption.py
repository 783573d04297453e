"""Attention that reads hidden state itself: exact, against transformers' own OPT and against projecting it."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_driver import BLOCK, CPU, GREEDY, HandDriver, Live, RecordingDecoder
from tiny_models import CASES, llama_config, model_folder, reference_model

from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution import memory
from engine.execution.cpu import absorbed
from engine.execution.cpu.device import TorchDevice
from engine.execution.runner import Runner
from engine.models.absorption import Absorption
from engine.models.checkpoint import load_weights
from engine.models.heads import Heads
from engine.models.spec import ModelSpec, load_spec, spec_from_config
from engine.models.weights import DummyTensors, ModelWeights, build_weights
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput
from predictor.limits import Limits

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "hidden_act": None,
    "tie_word_embeddings": True,
}
KINDS = (CacheKind.KV, CacheKind.HIDDEN)


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens whose K and V were projected from hidden state."""
    counts: list[int] = []
    original = Heads.kv

    def kv(self: Heads, layer: int, x: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(len(x))
        return original(self, layer, x, rotary)

    monkeypatch.setattr(Heads, "kv", kv)
    return counts


def opt_spec(**changes: Any) -> ModelSpec:
    return replace(spec_from_config(llama_config(**OPT)), **changes)


def weights_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return build_weights(spec, DummyTensors(0, dtype, CPU))


@functools.cache
def reference_decoder(case: str) -> RecordingDecoder:
    folder = model_folder(case)
    spec = load_spec(folder)
    return RecordingDecoder(spec, load_weights(spec, folder, dtype="float32", device=CPU))


@pytest.mark.parametrize("case", CASES)
def test_the_families_whose_k_and_v_are_linear_in_hidden_state(case: str) -> None:
    assert load_spec(model_folder(case)).absorbs_kv == case.startswith("opt")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [(4, 4, 16), (4, 2, 32)], ids=["mha", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_and_outputs_equal_those_over_projected_k_and_v(
    dtype: torch.dtype, heads: tuple[int, int, int], bias: bool
) -> None:
    """In bfloat16 from the same rounded weights, packed ones where the machine packs them."""
    num_heads, kv_heads, head_dim = heads
    spec = opt_spec(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, qkv_bias=bias)
    layer = weights_of(spec, dtype).layers[1]
    absorption = Absorption(spec, weights_of(spec, dtype))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, spec.hidden_size, generator=generator).to(dtype)
    q = torch.randn(3, num_heads, head_dim, generator=generator).to(dtype)
    p = torch.rand(3, num_heads, 9, generator=generator).softmax(-1) * 0.7
    k, v = layer.qkv(x)[:, spec.q_size :].float().view(9, 2, kv_heads, 1, head_dim).unbind(1)
    k, v = (each.expand(-1, -1, num_heads // kv_heads, -1).flatten(1, 2) for each in (k, v))
    absorbed_q, shift = absorption.queries(1, q)
    scores = torch.einsum("qhx,tx->qht", absorbed_q.float(), x.float())
    assert (shift is None) != bias
    if shift is not None:
        scores = scores + shift[..., None]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(scores, torch.einsum("qhd,thd->qht", q.float(), k), rtol=tolerance, atol=tolerance)
    got = absorption.values(1, torch.einsum("qht,tx->qhx", p, x.float()).to(dtype), p.sum(-1))
    expected = torch.einsum("qht,thd->qhd", p, v)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def check_against_transformers(case: str, request: Live) -> None:
    with torch.inference_mode():
        logits = reference_model(case)(torch.tensor([request.token_ids])).logits[0]
    for index, got in enumerate(request.logits):
        torch.testing.assert_close(got, logits[len(request.prompt) + index - 1], rtol=1e-4, atol=1e-4)


def check_mix(case: str, seed: int, kinds: tuple[CacheKind, ...], *, cuda: bool = False) -> None:
    """Hidden and KV blocks in one request, conversions, swaps and prefix hits, chunks on both sides of the limit: the
    logits of transformers."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 97, (10,), generator=generator).tolist()
    driver = HandDriver(
        reference_decoder(case), seed, kinds=kinds, num_units=60, host_units=60, scratch_blocks=16, cuda=cuda
    )
    requests = []
    for length in (1, 30, 5, 18, 11, 24):
        prompt = torch.randint(3, 97, (length,), generator=generator).tolist()
        requests.append(driver.add(shared + prompt if length % 2 else prompt, 8))
        driver.step()
    driver.run()
    assert driver.seen >= {"restore hidden", "swap_in hidden"}
    for request in requests:
        check_against_transformers(case, request)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", ["opt", "opt-no-bias-untied"])
def test_every_mix_gives_the_logits_of_transformers(case: str, seed: int) -> None:
    check_mix(case, seed, KINDS[seed % 2 :])


@pytest.mark.parametrize("piece", [1, 64 * BLOCK * 12, absorbed._PIECE])
def test_decodes_project_no_past_token(piece: int, monkeypatch: pytest.MonkeyPatch, projected: list[int]) -> None:
    """And however few of them share a product, they give the same."""
    monkeypatch.setattr(absorbed, "_PIECE", piece)
    driver = HandDriver(reference_decoder("opt"), 1, kinds=KINDS, scratch_blocks=20, calm=True)
    requests = [driver.add(list(range(5, 5 + length)), 6) for length in (9, 2, 14, 21)]
    while not all(request.logits for request in requests):
        driver.step()
    projected.clear()
    driver.run()
    assert not projected
    for request in requests:
        check_against_transformers("opt", request)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens whose K alone was projected."""
    counts: list[int] = []
    original = Heads.keys

    def project(self: Heads, layer: int, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        counts.append(len(x))
        return original(self, layer, x, rotary)

    monkeypatch.setattr(Heads, "keys", project)
    return counts


@pytest.mark.parametrize("case", ["llama", "qwen3"])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[1:]], ids=["mixed", "hidden"])
def test_decodes_with_rotary_embeddings_project_k_alone(
    case: str, kinds: tuple[CacheKind, ...], projected: list[int], keys: list[int]
) -> None:
    """As many KV heads as heads, K with and without norms; every token's logits are those of the same from K and V."""
    names = {"llama": {}, "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}}
    spec = spec_from_config(llama_config(num_key_value_heads=4, **names[case]))
    decoder = RecordingDecoder(spec, weights_of(spec))
    runs = []
    for chosen in (KINDS[:1], kinds):
        driver = HandDriver(decoder, 1, kinds=chosen, scratch_blocks=20, calm=True)
        requests = [driver.add(list(range(5, 5 + length)), 6) for length in (9, 2, 14, 21)]
        while not all(request.logits for request in requests):
            driver.step()
        projected.clear()
        keys.clear()
        driver.run()
        runs.append(requests)
        assert not projected and bool(keys) is (CacheKind.HIDDEN in chosen)
    for expected, found in zip(*runs, strict=True):
        assert found.token_ids == expected.token_ids
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_a_block_that_a_long_chunk_shares_with_a_decode_gets_both(projected: list[int], keys: list[int]) -> None:
    """A prefix in hidden state: one request decodes behind it, another computes a long chunk; only its own blocks are
    of the decode alone."""
    spec = spec_from_config(llama_config(num_key_value_heads=4))
    decoder = RecordingDecoder(spec, weights_of(spec))
    prefix, runs = tuple(range(10, 10 + 2 * BLOCK)), []
    first, second = (*prefix, 3, 4, 5, 6, 7), (*prefix, *range(30, 42))
    for kind in ("hidden", "kv"):
        runner = runner_of(decoder)
        entries = hidden if kind == "hidden" else _kv_blocks
        runner.launch(SchedulerOutput(0, (Chunk(1, 0, 12, False),), (start(runner, 1, entries(0, 1, 2, 3), first),)))()
        projected.clear()
        keys.clear()
        new = (start(runner, 2, entries(0, 1, 4, 5, 6), second),)
        runner.launch(SchedulerOutput(1, (Chunk(1, 12, 1, True), Chunk(2, 8, 12, True)), new))()
        if kind == "hidden":
            assert (sum(projected), sum(keys)) == (8 * spec.num_layers, 4 * spec.num_layers)
        assert decoder.last is not None
        runs.append(decoder.last.clone())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-4)


def _kv_blocks(*units: int) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, (2 * unit, 2 * unit + 1)) for unit in units)


def start(
    runner: Runner[TorchDevice], row: int, entries: tuple[CacheEntry, ...], tokens: tuple[int, ...]
) -> NewRequest:
    return NewRequest(row, f"r{row}", tokens, len(tokens), GREEDY, entries)


def hidden(*units: int) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,)) for unit in units)


def runner_of(decoder: RecordingDecoder) -> Runner[TorchDevice]:
    limits = Limits(4, 64, 64, num_units=24, block_size=BLOCK)
    return Runner(TorchDevice(decoder, limits, scratch_blocks=8))


@pytest.mark.parametrize("extra", [0, 1])
def test_only_chunks_beyond_the_limit_project_their_past(extra: int, projected: list[int]) -> None:
    """A chunk of `limit` tokens reads hidden state, one more token projects all of it; logits agree."""
    decoder = reference_decoder("opt")
    length = absorbed.chunk_limit(decoder.spec) + extra
    tokens = tuple(range(10, 10 + 9 + length))
    runner = runner_of(decoder)
    runner.launch(SchedulerOutput(0, (Chunk(1, 0, 9, False),), (start(runner, 1, hidden(*range(6)), tokens),)))()
    projected.clear()
    runner.launch(SchedulerOutput(1, (Chunk(1, 9, length, True),)))()
    assert sum(projected) == (9 * decoder.spec.num_layers if extra else 0)
    with torch.inference_mode():
        expected = reference_model("opt")(torch.tensor([tokens])).logits[0, -1]
    assert decoder.last is not None
    torch.testing.assert_close(decoder.last[0], expected, rtol=1e-4, atol=1e-4)


def test_a_poisoned_request_disturbs_nobody_beside_it() -> None:
    """NaN in a hidden unit of one decode, in a scratch slice, and in the unit that the block's stale entry names."""
    decoder = reference_decoder("opt")
    prompts = (tuple(range(20, 26)), tuple(range(40, 50)))
    runner = runner_of(decoder)
    new = (start(runner, 1, hidden(0, 1), prompts[0]), start(runner, 2, hidden(4, 5, 6), prompts[1]))
    first = runner.launch(SchedulerOutput(0, (Chunk(1, 0, 6, True), Chunk(2, 0, 10, True)), new))().token_ids
    runner.device.pool.units[0] = float("nan")
    runner.device.pool.slices[runner.device.pool.scratch_base :] = float("nan")
    both = runner.launch(SchedulerOutput(1, (Chunk(1, 6, 1, True), Chunk(2, 10, 1, True))))().token_ids
    assert both[0] == -1
    with torch.inference_mode():
        logits = reference_model("opt")(torch.tensor([[*prompts[1], first[1]]])).logits[0]
    assert [first[1], both[1]] == logits[-2:].argmax(-1).tolist()
    assert runner.device.pool.units[[2, 3, *range(8, 24)]].eq(0).all(), "nobody's units were written"


def test_the_copies_of_packed_weights_are_in_the_account() -> None:
    """Of 16-bit types the matrices are copies beside the packed ones: twice K and V; elsewhere views."""
    spec, rope = opt_spec(), spec_from_config(llama_config(num_key_value_heads=4))
    kv_bytes = spec.num_layers * 2 * spec.kv_size * spec.hidden_size * 2
    scratch = memory.scratch_bytes(spec, BLOCK, torch.bfloat16, 4)
    sizes = {"block_size": BLOCK, "scratch_blocks": 4, "device": CPU}
    assert memory.hidden_cache_bytes(spec, dtype=torch.bfloat16, **sizes) == scratch + 2 * kv_bytes
    assert memory.hidden_cache_bytes(rope, dtype=torch.bfloat16, **sizes) == scratch + kv_bytes
    assert memory.hidden_cache_bytes(spec, dtype=torch.float32, **sizes) == 2 * scratch
    weights = weights_of(spec)
    absorption = Absorption(spec, weights)
    storage = weights.layers[0].qkv.dense_from(0)[0].untyped_storage().data_ptr()
    assert absorption._weights[0][0].untyped_storage().data_ptr() == storage
