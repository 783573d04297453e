"""The hybrid cache on the runner of every backend: each request has the answer that it has alone from KV by torch."""

import functools
from typing import Any

import pytest
import torch
from devices import BACKENDS, device_of
from fakes.runner import FakeRunner
from hand_driver import BLOCK, CPU, GREEDY, VOCAB, HandDriver, Live, RecordingDecoder
from support.tables import mostly_slow
from test_offload import FakeTransport
from tiny_models import llama_config

from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.errors import ConfigError
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models.linear import make_linear
from engine.models.spec import spec_from_config
from engine.models.weights import DummyTensors, Gather, StreamedLayers, aligned, build_weights, matrices
from engine.scheduling.output import Chunk, ModelRunner, NewRequest, SchedulerOutput

pytestmark = pytest.mark.timeout(900)  # the native library may be built first
BOTH = (CacheKind.KV, CacheKind.HIDDEN)
TIE = 1e-3
MHA = {"num_key_value_heads": 4}

CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "hidden_act": None,
        "tie_word_embeddings": True,
    },
    "llama2": MHA,
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "narrow": {**MHA, "hidden_size": 48, "head_dim": 16},  # r = 0.375, as Gemma-7B
    "neox": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "rotary_pct": 0.25, "hidden_act": None},
    "gqa": {"num_key_value_heads": 2},
}
HYBRID = [name for name in CONFIGS if name != "gqa"]


class RoughTensors(DummyTensors):
    """Norms that differ from element to element, so that a wrong slice of one is seen."""

    def fetch(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().fetch(name, shape)
        if len(shape) == 1:
            tensor = tensor + 0.3 * torch.empty_like(tensor).normal_(generator=self._generator)
        return tensor


@functools.cache
def decoder_of(name: str, dtype: torch.dtype = torch.float32) -> RecordingDecoder:
    spec = spec_from_config(llama_config(**CONFIGS[name]))
    return RecordingDecoder(spec, build_weights(spec, RoughTensors(0, dtype, CPU)))


@functools.cache
def solo(name: str, prompt: tuple[int, ...], num_outputs: int) -> Live:
    """The request alone, all of it KV."""
    driver = HandDriver(decoder_of(name), 0, calm=True)
    request = driver.add(list(prompt), num_outputs)
    driver.run()
    return request


def prompts_of(seed: int) -> list[list[int]]:
    """Lengths from one token to many blocks; every second one begins with 14 shared tokens."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 97, (14,), generator=generator).tolist()
    prompts = []
    for index, length in enumerate((1, 33, 4, 20, 7, 26, 13, 17)):
        own = torch.randint(3, 97, (length,), generator=generator).tolist()
        prompts.append(shared + own if index % 2 else own)
    return prompts


def check_equal(name: str, request: Live) -> None:
    """Logits within 1e-4 of the solo run and the same tokens, up to a tie."""
    alone = solo(name, tuple(request.prompt), request.num_outputs)
    for index, (got, expected) in enumerate(zip(request.logits, alone.logits, strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        position = len(request.prompt) + index
        if request.token_ids[position] != alone.token_ids[position]:
            best = expected.topk(2).values
            assert best[0] - best[1] < TIE
            return


@pytest.mark.parametrize("seed", mostly_slow([0, 2], [0]))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, ["llama2", "neox", "gqa"]))
def test_every_mix_equals_the_solo_run(name: str, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds by block, conversions, swaps and parking at random moments, prefix hits, a pool that is often full. The
    runner for CUDA projects and copies in small pieces."""
    monkeypatch.setattr("engine.execution.cuda.forward.PIECE", 7)
    monkeypatch.setattr("engine.execution.cuda.swap.STAGING_BYTES", 1)
    kinds = (CacheKind.KV,) if name == "gqa" else (BOTH, BOTH, (CacheKind.HIDDEN,))[seed % 3]
    driver = HandDriver(
        decoder_of(name),
        seed,
        kinds=kinds,
        num_units=40 + 10 * (seed % 3),
        host_units=60,
        scratch_blocks=0 if name == "gqa" else 16 + 8 * (seed % 2),
        backend=backend,
    )
    requests = []
    for prompt in prompts_of(seed):
        requests.append(driver.add(prompt, 9))
        driver.step()
    driver.run()
    for request in requests:
        check_equal(name, request)
    wanted = {"swap_out kv", "swap_in kv"} if name == "gqa" else {"restore hidden", "swap_out hidden", "swap_in hidden"}
    assert driver.seen >= wanted


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", mostly_slow(HYBRID, ["opt"]))
def test_every_mix_is_the_same_where_weights_stream(name: str, seed: int) -> None:
    """A layer that streams projects, restores and reads hidden state by weights that are in a buffer then."""
    spec = spec_from_config(llama_config(**CONFIGS[name], num_hidden_layers=5))

    def made(*gather: Gather) -> RecordingDecoder:
        return RecordingDecoder(spec, build_weights(spec, RoughTensors(0, torch.float32, CPU), make_linear, *gather))

    resident = made()
    size = max(sum(aligned(each.data().nbytes) for each in matrices(layer)) for layer in resident.weights.layers)
    gather = functools.partial(StreamedLayers, streamed=(0, 2, 3), transport=FakeTransport(size))
    runs = []
    for decoder in (resident, made(gather)):
        driver = HandDriver(decoder, seed, kinds=BOTH[seed:], num_units=50, host_units=60, scratch_blocks=16)
        requests = []
        for prompt in prompts_of(seed):
            requests.append(driver.add(prompt, 6))
            driver.step()
        driver.run()
        assert driver.seen >= {"restore hidden", "swap_in hidden"}
        runs.append(requests)
    for expected, found in zip(*runs, strict=True):
        assert found.token_ids == expected.token_ids
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", mostly_slow(HYBRID, ["qwen3"]))
def test_bfloat16_stays_near(name: str) -> None:
    """Rounding differs where the products have other shapes; the logits stay within a few roundings."""
    decoder = decoder_of(name, torch.bfloat16)
    runs = []
    for kinds, scratch in (((CacheKind.KV,), 0), ((CacheKind.HIDDEN,), 40)):
        driver = HandDriver(decoder, 5, kinds=kinds, scratch_blocks=scratch, host_units=60, calm=not scratch)
        requests = [driver.add(prompt, 1) for prompt in prompts_of(2)]
        driver.run()
        runs.append(requests)
    assert driver.seen >= {"restore hidden", "swap_in hidden"}
    for from_kv, from_hidden in zip(*runs, strict=True):
        assert (from_kv.logits[0] - from_hidden.logits[0]).abs().max() < 0.15


# --- by hand -----------------------------------------------------------------------------------------------------


def hidden(*units: int) -> tuple[CacheEntry, ...]:
    return tuple(CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,)) for unit in units)


def kv(*units: int) -> tuple[CacheEntry, ...]:
    pairs = zip(units[::2], units[1::2], strict=True)
    return tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in pairs)


def host(entry: CacheEntry, *units: int) -> CacheEntry:
    return CacheEntry(entry.kind, Tier.HOST, units)


def bare_runner(
    backend: str = "torch", name: str = "llama2", scratch_blocks: int = 4, host_units: int = 4, max_model_len: int = 32
) -> Runner[Any]:
    decoder, limits = decoder_of(name), Limits(4, 16, max_model_len, num_units=16, block_size=BLOCK)
    tiers = {"scratch_blocks": scratch_blocks, "host_units": host_units}
    return Runner(device_of(backend, decoder.spec, decoder.weights, limits, **tiers))


by_hand = pytest.mark.parametrize("backend", ["torch", "cuda"])


PROMPT = (7, 11, 13, 17, 19, 23)


def start(runner: ModelRunner, entries: tuple[CacheEntry, ...]) -> int:
    new = NewRequest(1, "r", PROMPT, len(PROMPT), GREEDY, entries)
    return runner.launch(SchedulerOutput(0, (Chunk(1, 0, len(PROMPT), True),), (new,)))().token_ids[0]


@by_hand
def test_what_was_not_made_room_for_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match="exceeds the 32 values"):
        bare_runner(backend, "gqa")
    assert bare_runner(backend, "gqa", scratch_blocks=0).device.pool.scratch_blocks == 0
    with pytest.raises(AssertionError, match="2 blocks of hidden state, scratch holds 1"):
        start(bare_runner(backend, scratch_blocks=1), hidden(0, 1))
    with pytest.raises(AssertionError, match="has no scratch"):
        start(bare_runner(backend, scratch_blocks=0), hidden(0, 1))
    out = CacheOperation(CacheAction.SWAP_OUT, *hidden(0), host(*hidden(0), 0))
    with pytest.raises((AssertionError, IndexError), match=r"has no host tier|out of bounds"):
        bare_runner(backend, host_units=0).launch(SchedulerOutput(0, (), operations=(out,)))()
    with pytest.raises(AssertionError, match="on the device"):
        start(bare_runner(backend), (*hidden(0), host(*hidden(1), 0)))


@pytest.mark.parametrize(
    "operation",
    [
        CacheOperation(CacheAction.RESTORE, *kv(0, 1), *kv(2, 3)),
        CacheOperation(CacheAction.RESTORE, *hidden(0), *hidden(1)),
        CacheOperation(CacheAction.SWAP_OUT, *hidden(0), *hidden(1)),
        CacheOperation(CacheAction.SWAP_IN, *hidden(0), host(*hidden(0), 0)),
        CacheOperation(CacheAction.SWAP_OUT, *hidden(0), host(*kv(0, 1), 0, 1)),
    ],
    ids=str,
)
def test_operations_that_make_no_sense_are_refused(operation: CacheOperation) -> None:
    with pytest.raises(AssertionError):
        bare_runner().launch(SchedulerOutput(0, (), operations=(operation,)))()


@by_hand
def test_a_poisoned_request_disturbs_nobody(backend: str) -> None:
    """NaN in one request's hidden unit reaches neither its neighbours nor the next user of its scratch."""
    runner = bare_runner(backend)
    start(runner, hidden(0, 1))
    new = NewRequest(2, "r", PROMPT, len(PROMPT), GREEDY, hidden(4, 5))
    other = runner.launch(SchedulerOutput(1, (Chunk(2, 0, 6, True),), (new,)))().token_ids
    runner.device.pool.units[0] = float("nan")
    both = runner.launch(SchedulerOutput(2, (Chunk(1, 6, 1, True), Chunk(2, 6, 1, True))))().token_ids
    assert both[0] == -1
    again = runner.launch(SchedulerOutput(3, (Chunk(2, 7, 1, True),)))().token_ids
    alone = bare_runner()
    known = [start(alone, kv(0, 1, 2, 3))]
    known += [alone.launch(SchedulerOutput(s, (Chunk(1, 5 + s, 1, True),)))().token_ids[0] for s in (1, 2)]
    assert [*other, both[1], *again] == known


# --- the checking fake runner ------------------------------------------------------------------------------------


def fake_after(*operations: CacheOperation, table: tuple[CacheEntry, ...]) -> None:
    """Write a prompt into a hidden block and a KV one, run the operations, read one more token through `table`."""
    runner = FakeRunner(block_size=BLOCK, vocab_size=VOCAB, scratch_blocks=2, host_units=4)
    token = start(runner, (*hidden(0), *kv(2, 3)))
    new = NewRequest(2, "r", (*PROMPT, token), len(PROMPT), GREEDY, table)
    runner.launch(SchedulerOutput(1, (Chunk(2, 6, 1, True),), (new,), (), (1,), operations=operations))()


RESTORE = CacheOperation(CacheAction.RESTORE, *hidden(0), *kv(6, 7), 0)
OUT = CacheOperation(CacheAction.SWAP_OUT, *kv(2, 3), host(*kv(2, 3), 0, 1))
BACK = CacheOperation(CacheAction.SWAP_IN, host(*kv(2, 3), 0, 1), *kv(9, 8))


@pytest.mark.parametrize(
    ("operations", "table", "message"),
    [
        ((), (*kv(6, 7), *kv(2, 3)), "not this request's"),
        ((RESTORE._replace(start=4),), (*kv(6, 7), *kv(2, 3)), "not this request's"),
        ((RESTORE,), (*kv(7, 6), *kv(2, 3)), "not this request's"),
        ((RESTORE._replace(source=hidden(2)[0]),), (*kv(6, 7), *kv(2, 3)), "not this request's"),
        ((OUT, BACK), (*hidden(0), *kv(8, 9)), "not this request's"),
        ((BACK,), (*hidden(0), *kv(9, 8)), "not this request's"),
        ((OUT,), (*hidden(0), OUT.target), "on the host is read"),
        ((OUT, OUT), (*hidden(0), *kv(2, 3)), "written twice"),
        ((OUT._replace(target=host(*kv(2, 3), 4, 5)),), (*hidden(0), *kv(2, 3)), "no such host unit"),
        ((), (*hidden(0, 2),), "not this request's"),
    ],
    ids=str,
)
def test_the_fake_runner_finds_what_is_wrong(
    operations: tuple[CacheOperation, ...], table: tuple[CacheEntry, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        fake_after(*operations, table=table)
