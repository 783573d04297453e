"""Prompts by FlashAttention-3 as torch offers it: what it is given, and when it is chosen."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_engine import make_driver
from dry_device import dry_device
from test_dry_device import counts_of, make_runner
from test_runner import check_greedy, crowd, make_decoder, run_in_waves
from tiny_models import model_folder
from torch import Tensor
from torch.nn.attention import varlen

from engine.execution.cuda import flash, flash_trial
from engine.execution.cuda.buffers import HeadSizes
from engine.execution.cuda.flash import FlashPrefill
from engine.models import torch_ops
from engine.models.spec import load_spec
from engine.triton_kernels import configs
from engine.triton_kernels.work import PrefillWork
from predictor.limits import Limits

CPU = torch.device("cpu")
LAYERS, BLOCK = 3, 4


def varlen_attn_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """What torch's documentation says of the function of this name, with FlashAttention's conditions on what it takes:
    sequence by sequence, the last query at the last key."""
    assert cu_seq_k is None, "pages of keys have no places one behind the other"
    assert key.shape == value.shape and key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
    assert all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in (cu_seq_q, seqused_k, block_table))
    assert len(cu_seq_q) == len(seqused_k) + 1 == len(block_table) + 1
    left, right = window_size
    group = query.shape[1] // key.shape[2]
    assert right == 0 and enable_gqa
    for index, (first, end) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
        length, count = int(seqused_k[index]), end - first
        assert 0 <= count <= max_q and length <= max_k
        if not count:
            continue
        pages = block_table[index, : -(-length // key.shape[1])].long()
        assert bool((pages < len(key)).all())
        k, v = (each[pages].flatten(0, 1)[:length].repeat_interleave(group, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), k.float()) * scale
        past = torch.arange(length - count, length)[:, None] - torch.arange(length)
        unseen = (past < 0) | ((past > left) if left >= 0 else False)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(out.dtype)
    return out


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_chunks_gather_what_the_twin_gathers(heads: tuple[int, int], window: int) -> None:
    """Behind decodes, behind pasts and alone, with room for more chunks than there are, in each layer."""
    generator = torch.Generator().manual_seed(window)
    (num_heads, kv_heads), units = heads, 60
    cells = torch.randn((units * LAYERS, BLOCK, kv_heads, 16), generator=generator)
    table = (2 * torch.randperm(units // 2 - 1, generator=generator)[:27].reshape(3, 9) * LAYERS).to(torch.int32)
    work = PrefillWork(5, 12, 8, CPU)
    chunks = np.array([[2, 3, 6, 0], [0, 9, 5, 20], [1, 14, 2, 11]], np.int32)
    work.fill(chunks)
    q = torch.randn((18, num_heads, 16), generator=generator)
    attend = FlashPrefill(varlen_attn_out, cells, LAYERS, max_model_len=36)
    attend.begin(work.chunks, table)
    for layer in range(LAYERS):
        actual, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
        attend(q, actual, layer=layer, scale=0.3, window=window)
        torch_ops.prefill_attention(
            q, cells, table, None, work, q, q, expected, layer=layer, scratch_base=len(cells), scale=0.3, window=window,
            pair=LAYERS,
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert (actual[:3] == 7.0).all() and (actual[16:] == 7.0).all(), "decodes and padding stay as they are"


@pytest.mark.parametrize("name", ["llama", "window"])
def test_an_engine_whose_prompts_attend_so_gives_the_same_tokens(name: str) -> None:
    """A pool that is always full: preemptions, prefix hits, mixed steps, reused units and rows."""
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}
    decoder = make_decoder(**(window if name == "window" else {}))
    driver = make_driver(decoder.spec, decoder.weights, num_blocks=20, tokens=24)
    device = driver.runner.device
    device._forward.flash = FlashPrefill(varlen_attn_out, device._forward.cells, device._tables.pair, 200)
    requests = crowd(np.random.default_rng(3), 12)
    run_in_waves(driver, requests)
    assert sum(driver.core.stats().preemptions.values()) > 0
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


@pytest.mark.parametrize("graphs", [True, False])
def test_no_step_with_such_prompts_waits_for_the_device_or_the_compiler(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own function, on a device without values: it takes what it is given."""
    spec, calls = load_spec(model_folder("llama-gqa2")), []

    def call(out: Tensor, q: Tensor, *others: Any, **options: Any) -> None:
        calls.append(varlen.varlen_attn_out(out, q, *others, **options).shape == q.shape)

    monkeypatch.setattr(flash_trial, "load", lambda: call)
    for name in ("refusal", "_tried"):
        monkeypatch.setattr(flash_trial, name, lambda *_: None)
    monkeypatch.setattr(flash_trial, "_FEWEST", 1)
    with dry_device() as dry:
        runner = make_runner(spec, graphs=graphs)
        assert isinstance(runner.device._forward.flash, FlashPrefill)
        assert runner.device.num_graphs == (runner.device.num_shapes if graphs else 0)
        dry.sealed = True
        before = len(calls)
        for counts in counts_of(dry, runner, "greedy"):
            assert counts["graphs"] == int(graphs) and not counts["blocking"]
        eager = 0 if graphs else 2 * spec.num_layers  # two of five steps have prompts
        assert len(calls) == before + eager and all(calls) and (before > 0) == graphs


def pool_of(**changes: object) -> Any:
    return SimpleNamespace(**{"device": CPU, "paired": True, "bytes": None, "dtype": torch.bfloat16} | changes)


HEADS = HeadSizes(8, 2, 64, 64)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "is_cuda", lambda _device: True)
    monkeypatch.setattr(configs, "device_arch", lambda _device: 90)
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda _name: object())


@pytest.mark.usefixtures("on_hopper")
def test_it_is_refused_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.refusal(pool_of(), HEADS, 0.0) is None
    for changes in ({"paired": False}, {"bytes": object()}, {"dtype": torch.float32}):
        assert "by one table" in str(flash.refusal(pool_of(**changes), HEADS, 0.0))
    for heads, softcap in ((HEADS, 30.0), (HEADS._replace(value_dim=32), 0.0), (HeadSizes(8, 2, 20, 20), 0.0)):
        assert "such heads" in str(flash.refusal(pool_of(), heads, softcap))
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda _name: None)
    assert "not installed" in str(flash.refusal(pool_of(), HEADS, 0.0))
    monkeypatch.setattr(configs, "device_arch", lambda _device: 100)
    assert "9.0" in str(flash.refusal(pool_of(), HEADS, 0.0))


def writes(value: float) -> Callable[[Tensor], None]:
    def attend(out: Tensor) -> None:
        out.copy_(torch.arange(1.0, 5.0))
        out[3] += value

    return attend


def fails(_: Tensor) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def of_an_older_torch(_: Tensor) -> None:
    raise TypeError("unexpected keyword argument 'block_table'")


@pytest.mark.parametrize(
    ("theirs", "seconds", "reason"),
    [
        (writes(0.01), 0.5, None),
        (writes(0.5), 0.5, "12.5% off"),
        (writes(float("nan")), 0.5, "nan"),
        (writes(0.0), 1.5, "1.50 of its time"),
        (fails, 0.5, "not permitted"),
        (of_an_older_torch, 0.5, "block_table"),
    ],
)
def test_the_trial_takes_what_is_right_and_quicker(
    theirs: Callable[[Tensor], None], seconds: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = writes(0.0)
    monkeypatch.setattr(flash_trial, "_seconds", lambda attend, _: 1.0 if attend is ours else seconds)
    found = flash_trial.compare(ours, theirs, torch.zeros(4))
    assert found is None if reason is None else found is not None and reason in found


def test_the_trial_runs_a_prompt_in_units_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways over the same numbers, which differ by their rounding, and nothing is left of it. A build that does not
    load is no error, and a pool of a few tokens says nothing."""
    decoder = make_decoder()
    device = make_driver(decoder.spec, decoder.weights, tokens=64).runner.device
    apart: list[float] = []

    def compare(ours: Callable[[Tensor], None], theirs: Callable[[Tensor], None], out: Tensor) -> None:
        ours(out)
        first = out.clone()
        theirs(out)
        apart.append(float((out - first).abs().max()))
        assert first.abs().max() > 0.1

    monkeypatch.setattr(flash_trial, "refusal", lambda *_: None)
    monkeypatch.setattr(flash_trial, "compare", compare)
    limits = Limits(12, 64, 200, num_units=device.pool.num_units, block_size=BLOCK)
    parts = (device.pool, device.rows, device._tables, device._forward, device._buffers)
    trials = [(64, flash.load, False), (65, lambda: varlen_attn_out, False), (64, lambda: varlen_attn_out, True)]
    for fewest, how, kept in trials:
        monkeypatch.setattr(flash_trial, "_FEWEST", fewest)
        monkeypatch.setattr(flash_trial, "load", how)
        with torch.inference_mode():
            found = flash_trial.choose(decoder.spec, limits, *parts)
        assert (found is not None) == kept
    assert "does not load: No module named 'flash_attn_interface'" in caplog.text
    assert len(apart) == 1 and apart[0] < 1e-4
    assert not device.pool.units.any() and not device._tables.tables.any()
