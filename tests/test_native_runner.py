"""Steps by the native kernels under the real core, and in any mix of KV, hidden state and host memory."""

import functools
import math
from pathlib import Path
from typing import Any

import hand_driver
import numpy as np
import pytest
import torch
from driver import Driver, make_request
from hand_driver import HandDriver, RecordingDecoder
from native_build import native_library
from test_hybrid_cache import CONFIGS, check_equal, decoder_of, prompts_of, solo
from test_runner import BLOCK, SAMPLED, check_greedy, crowd, make_decoder, run_in_waves

from engine.api import SamplingParams
from engine.arrays import IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.errors import ConfigError
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import Level, Library, Team
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.cpu.native.model import NativeModel, Sampled
from engine.execution.cpu.native.start import start
from engine.execution.runner import Runner
from engine.limits import Limits, SchedulerConfig
from engine.models.decoder import Decoder
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput

pytestmark = pytest.mark.timeout(900)  # the first test may have to build the library


@functools.cache
def native() -> Native:
    library = native_library()
    return Native(library, min(max(library.levels()), Level.AVX512), Team(library, 2))


def make_native_driver(decoder: Decoder, *, num_blocks: int = 200, tokens: int = 32, plain: bool = False) -> Driver:
    config = SchedulerConfig(
        num_units=2 * num_blocks,
        max_model_len=min(num_blocks * BLOCK, 200),
        block_size=BLOCK,
        max_num_seqs=12,
        max_num_batched_tokens=tokens,
        min_prefill_chunk=8,
    )
    device = TorchDevice(decoder, config.limits) if plain else NativeDevice(decoder, native(), config.limits)
    return Driver(Runner(device), config)


def test_greedy_outputs_equal_the_model_without_a_cache() -> None:
    """A pool that is always full: preemptions, prefix hits, mixed steps, reused units."""
    decoder = make_decoder()
    requests = crowd(np.random.default_rng(11), 16)
    driver = make_native_driver(decoder, num_blocks=20, tokens=24)
    run_in_waves(driver, requests)
    stats = driver.core.stats()
    assert sum(stats.preemptions.values()) > 0
    assert stats.prefix_hit_tokens > 0
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_outputs_are_those_of_torch(sampling: dict[str, object]) -> None:
    """The same logits but for rounding, so the same draws; a request may part where a draw falls on a border."""
    outputs = []
    for plain in (False, True):
        driver = make_native_driver(make_decoder(), plain=plain)
        run_in_waves(driver, crowd(np.random.default_rng(14), 8, **sampling))
        outputs.append(driver.outputs)
    same = sum(outputs[0][name] == outputs[1][name] for name in outputs[0])
    assert same >= len(outputs[0]) - 1


def test_logprobs_are_those_of_torch() -> None:
    wants = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    entries = tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, (2 * block, 2 * block + 1)) for block in range(3))
    new = NewRequest(0, "r", tuple(range(5, 16)), 11, wants, entries)
    found = []
    for plain in (False, True):
        runner = make_native_driver(make_decoder(), plain=plain).runner
        found.append(runner.launch(SchedulerOutput(1, (Chunk(0, 0, 11, True),), (new,)))())
    assert found[0].token_ids == found[1].token_ids
    (ours,), (theirs,) = (result.logprobs or [None] for result in found)
    assert ours is not None and theirs is not None
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


class _Keeping:
    """A native model whose logits are kept where the driver looks for them."""

    def __init__(self, model: NativeModel, decoder: RecordingDecoder) -> None:
        self._model = model
        self._decoder = decoder

    def run(self, chunks: IntArray, *, logits: bool, **stage: Any) -> Sampled:
        result = self._model.run(chunks, logits=True, **stage)
        self._decoder.last = None if result.logits is None else result.logits.clone()
        return Sampled(result.best, result.best_ids, result.logits if logits else None)


class _KeepingDevice(NativeDevice):
    def __init__(self, decoder: RecordingDecoder, limits: Limits, **tiers: int) -> None:
        super().__init__(decoder, native(), limits, **tiers)
        self._native = _Keeping(self._native, decoder)  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_every_mix_equals_the_solo_run(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV on the device and on the host, and hidden state where the model allows it, which goes by torch."""
    decoder = decoder_of(name)
    hybrid = 2 * decoder.spec.hidden_ratio <= 1
    kinds = (CacheKind.KV, CacheKind.HIDDEN) if hybrid else (CacheKind.KV,)
    for prompt in prompts_of(seed):
        solo(name, tuple(prompt), 8)  # by torch, kept for the comparison
    monkeypatch.setattr(hand_driver, "TorchDevice", _KeepingDevice)
    driver = HandDriver(decoder, seed, kinds=kinds, host_units=60, scratch_blocks=20 if hybrid else 0)
    requests = [driver.add(prompt, 8) for prompt in prompts_of(seed)]
    driver.run()
    for request in requests:
        check_equal(name, request)


def test_a_poisoned_request_ends_alone() -> None:
    decoder = make_decoder()
    decoder.weights.embedding[96] = math.nan
    driver = make_native_driver(decoder)
    requests = crowd(np.random.default_rng(16), 4)
    run_in_waves(driver, [*requests, make_request("bad", [5, 96, 7], 4)])
    assert driver.outputs["bad"] == []
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


# ---- which level runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_highest_level_that_is_right_is_taken(dtype: torch.dtype) -> None:
    found = start(2, dtype, native_library())
    assert isinstance(found, Native)
    assert found.level == min(found.level_for(dtype), max(native_library().levels()))


def test_a_level_that_answers_otherwise_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeLinear.op

    def wrong(self: NativeLinear, *words: object) -> object:
        op = right(self, *words)  # type: ignore[arg-type]
        if self.native.level > Level.AVX2 and self.out_features == 80:
            op.bias = self.panels.data_ptr()
        return op

    monkeypatch.setattr(NativeLinear, "op", wrong)
    found = start(1, torch.float32, native_library())
    assert isinstance(found, Native) and found.level is Level.AVX2
    above = [level for level in native_library().levels() if Level.AVX2 < level <= Level.AVX512]
    assert caplog.text.count("are not used") == len(above), "those for bfloat16 are none of a float32 model"


def test_without_a_library_the_reason_is_given() -> None:
    assert start(2, torch.float32, "it was not built") == "it was not built"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"nothing")
    with pytest.raises((OSError, ConfigError)):
        Library(path)
