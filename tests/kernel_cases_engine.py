"""The whole engine over the kernels themselves, with graphs where there is a GPU: tokens as the dense model gives them.

Run by test_kernels.py in a process of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_engine import make_driver, make_runner
from driver import make_request
from kernel_pool import DEVICE, INTERPRETED
from lora_adapters import make_adapter
from test_runner import POISON, check_greedy
from tiny_models import model_folder, reference_model

from engine.api import SamplingParams
from engine.arrays import IntArray
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.config import NamedFolder
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernel_check import KernelFaults, check_kernels
from engine.limits import Limits, SchedulerConfig
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.lora import load_adapter, plan_adapter
from engine.models.spec import ModelSpec, load_spec
from engine.scheduling.output import Chunk, NewRequest, ReplacedEntry, SchedulerOutput
from engine.triton_kernels import Kernels, triton_kernels
from engine.triton_kernels.work import DecodeWork


@pytest.mark.parametrize(
    ("name", "num_blocks", "lengths", "max_tokens"),
    [
        ("llama-gqa2", 40, [2, 1], 3) if INTERPRETED else ("llama-gqa2", 6, [2, 1, 3], 10),
        ("neox", 40, [2, 9], 3),
        ("opt", 40, [2, 9], 3),
    ],
)
def test_families(name: str, num_blocks: int, lengths: list[int], max_tokens: int) -> None:
    """Requests with a shared first block, steps launched ahead; in the small pool, which takes the interpreter long,
    with preemptions and prefix hits."""
    spec = load_spec(folder := model_folder(name))
    weights = load_weights(spec, folder, device=DEVICE)
    driver = make_driver(spec, weights, kernels=triton_kernels(), num_blocks=num_blocks, seqs=3, tokens=16)
    rng = np.random.default_rng(5)
    shared = rng.integers(0, POISON, 4).tolist()
    requests = [
        make_request(f"r{index}", shared + rng.integers(0, POISON, length).tolist(), max_tokens)
        for index, length in enumerate(lengths)
    ]
    for request in requests:
        driver.add(request)
        driver.step()
    driver.run()
    for request in requests:
        check_greedy(Decoder(spec, load_weights(spec, folder)), request, driver.outputs[request.request_id])
    stats = driver.stats()
    assert num_blocks > 6 or (sum(stats.preemptions.values()) > 0 and stats.prefix_hit_tokens > 0)


def test_the_check_at_start_finds_no_fault_and_names_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(folder := model_folder("qwen3"))
    weights, kernels = load_weights(spec, folder, device=DEVICE), triton_kernels()
    splits = []

    def make(small: ModelSpec, few: Limits, given: Kernels, graphs: bool) -> CudaDevice:
        return CudaDevice(small, weights, given, few, graphs=graphs)

    def fill(work: DecodeWork, *args: IntArray, original: Callable[..., None] = DecodeWork.fill) -> None:
        original(work, *args)
        splits.append(int(work.ranges[:, 1].max()))

    monkeypatch.setattr(DecodeWork, "fill", fill)
    limits = Limits(3, 24, 1064, 0, 16)
    assert check_kernels(spec, limits, kernels, make, graphs=not INTERPRETED) == KernelFaults()
    assert max(splits) > 1
    right = kernels.silu_and_mul
    monkeypatch.setattr(kernels, "silu_and_mul", lambda x: right(x) * 1.1)
    short = replace(limits, max_model_len=64)
    assert list(check_kernels(spec, short, kernels, make, graphs=False).kernels) == ["silu_and_mul"]


def test_rows_of_two_adapters_and_of_none(tmp_path: Path) -> None:
    """In one step each answers as a model with merged weights: prompts gather their rows, decodes go by slots."""
    folder = model_folder("qwen3")
    spec, original = load_spec(folder), reference_model("qwen3")
    weights = load_weights(spec, folder, device=DEVICE)
    driver = make_driver(spec, weights, kernels=triton_kernels(), num_blocks=40, seqs=3, tokens=16, adapted=True)
    models = [original]
    for number, rank in ((1, 3), (2, 17)):
        made = make_adapter(tmp_path / str(number), original, lambda last: last.endswith("_proj"), rank=rank, seed=rank)
        plan = plan_adapter(NamedFolder(str(number), made.folder), spec)
        driver.runner.device.adapt(number, load_adapter(plan, spec, weights.embedding))
        models.append(made.merged(original))
    prompt = [5, 9, 14, 20, 33]
    for number in range(3):
        driver.add(replace(make_request(f"r{number}", prompt, 3), adapter=number))
    driver.run()
    answers = []
    for model in models:
        ids = list(prompt)
        for _ in range(3):
            with torch.inference_mode():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    assert [driver.outputs[f"r{number}"] for number in range(3)] == answers
    assert len(set(map(tuple, answers))) == 3 and driver.runner.device.adapters.slots_of(np.array([1, 2])) is not None


@pytest.mark.parametrize("name", ["qwen3"] if INTERPRETED else ["opt", "qwen3"])
def test_hidden_state_restored_swapped_and_run_from(name: str) -> None:
    """One prompt over a hidden block and one of KV: through the host and back, and a restore, against KV alone."""
    folder = model_folder(name)
    spec = load_spec(folder)
    weights = load_weights(spec, folder, device=DEVICE)
    prompt = (7, 11, 13, 17, 19, 23)
    config = SchedulerConfig(
        num_units=16, max_model_len=32, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, host_units=4,
        scratch_blocks=2,
    )  # fmt: skip
    runs = []
    for mixed in (False, True):
        runner = make_runner(spec, weights, config, triton_kernels())
        if mixed:
            runner.device.warm_up()
        entries = (_entry(0), _entry(2, 3)) if mixed else (_entry(0, 1), _entry(2, 3))
        new = NewRequest(1, "r", prompt, 6, SamplingParams(max_tokens=4, temperature=0.0), entries)
        tokens = runner.launch(SchedulerOutput(0, (Chunk(1, 0, 6, True),), (new,)))().token_ids
        tokens += runner.launch(SchedulerOutput(1, (Chunk(1, 6, 1, True),)))().token_ids
        operations, replaced = (), ()
        if mixed:
            out = CacheEntry(CacheKind.KV, Tier.HOST, (1, 2))
            operations = (
                CacheOperation(CacheAction.SWAP_OUT, _entry(2, 3), out),
                CacheOperation(CacheAction.SWAP_IN, out, _entry(8, 9)),
                CacheOperation(CacheAction.RESTORE, _entry(0), _entry(2, 3), 0),
            )
            replaced = (ReplacedEntry(1, 0, _entry(2, 3)), ReplacedEntry(1, 1, _entry(8, 9)))
        step = SchedulerOutput(2, (Chunk(1, 7, 1, True),), replaced=replaced, operations=operations)
        runs.append(tokens + runner.launch(step)().token_ids)
    assert runs[0] == runs[1] and min(runs[0]) >= 0


def _entry(*units: int) -> CacheEntry:
    return CacheEntry(CacheKind.KV if len(units) == 2 else CacheKind.HIDDEN, Tier.DEVICE, units)
