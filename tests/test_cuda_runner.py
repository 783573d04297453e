"""Parts of the runner for CUDA on the CPU, with the kernels' twins; `test_runner` has what all backends share."""

import dataclasses
from typing import NoReturn

import numpy as np
import pytest
import torch
from cuda_engine import CudaDriver, make_driver
from devices import pool_of
from driver import make_request
from support.tables import mostly_slow
from test_runner import POISON, SAMPLED, check_greedy, crowd, make_decoder, run_in_waves, solo
from tiny_models import FAMILY_CASES, FEW_FAMILIES, model_folder

from engine.api import FinishReason, SamplingParams
from engine.arrays import IntArray
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution.cuda.buffers import (
    GRAPH_TOKENS,
    Buckets,
    DrawInputs,
    RepeatedStep,
    StepBuffers,
    StepInputs,
)
from engine.execution.cuda.forward import DeviceTables, Graphs
from engine.execution.rows import RowTable, decodes_first
from engine.limits import Limits
from engine.models.attention import HeadSizes
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.spec import load_spec
from engine.scheduling.output import NewRequest, SchedulerOutput
from engine.triton_kernels import twins


def driver_of(decoder: Decoder, depth: int = 1, **options: int) -> CudaDriver:
    """The host samples no step for any request: it would wait for the device, and copy from it."""
    driver = make_driver(decoder.spec, decoder.weights, depth=depth, **options)
    driver.runner._sample = sampled_by_the_host  # type: ignore[method-assign]
    return driver


def sampled_by_the_host(*_: object) -> NoReturn:
    raise AssertionError("a step of the CUDA runner was sampled by the host")


@pytest.mark.parametrize(
    "name",
    mostly_slow([*FAMILY_CASES, "neox-sequential-tied", "qwen2-window"], FEW_FAMILIES),
)
def test_every_family_equals_the_cpu_path(name: str) -> None:
    """Against the decoder, held by its own tests against transformers; partial rotation and absolute positions too."""
    folder = model_folder(name)
    spec = load_spec(folder)
    decoder = Decoder(spec, load_weights(spec, folder))
    requests = crowd(np.random.default_rng(22), 5)
    driver = driver_of(decoder, seqs=4)
    run_in_waves(driver, requests)
    for request in requests:
        check_greedy(decoder, request, driver.outputs[request.request_id])


def test_a_request_that_stops_costs_one_step_and_disturbs_nobody() -> None:
    """Its end is seen while its next token is being computed; the row goes to the next request."""
    decoder = make_decoder()
    free = solo(make_request("free", [3, 1, 4], 12))
    driver = driver_of(decoder, seqs=2)
    stop = frozenset(free[3:4])
    requests = [make_request("stops", [3, 1, 4], 12, stop_token_ids=stop)]
    requests += [make_request(f"next{i}", [i + 1, 5, 9, 2 * i], 6) for i in range(4)]
    driver.add(*requests)
    driver.run()
    assert driver.outputs["stops"] == free[: free.index(free[3]) + 1]
    assert driver.finals["stops"].finish_reason is FinishReason.STOP
    for request in requests[1:]:
        check_greedy(decoder, request, driver.outputs[request.request_id])


@pytest.mark.parametrize("num_blocks", mostly_slow([200, 16], [16]))
def test_repeated_steps_equal_full_uploads(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token and in all inputs; in the small pool with preemptions."""
    decoder, repeats, counts = make_decoder(), RepeatedStep.repeats, []
    kinds = [{}, {"temperature": 1.1, "top_p": 0.8}, {"temperature": 0.7, "logprobs": 2}, SAMPLED["penalised"]]
    requests = [
        make_request(f"r{i}", [5 + i, 7, 2 * i, *range(i)], 20 - i, seed=i, **kinds[i // 2])  # type: ignore[arg-type]
        for i in range(8)
    ]
    outputs = []
    for repeated in (True, False):
        driver = driver_of(decoder, seqs=4, num_blocks=num_blocks)
        if repeated:
            counts = check_repeated(driver)
        monkeypatch.setattr(RepeatedStep, "repeats", repeats if repeated else lambda *_: False)
        for request in requests:
            driver.add(request)
            driver.step()
        driver.run()
        outputs.append(driver.outputs)
        assert any(final.num_preemptions for final in driver.finals.values()) is (num_blocks < 200)
    assert outputs[0] == outputs[1] and len(counts) > 10 and max(counts) > 1
    assert outputs[0] == {request.request_id: solo(request) for request in requests}


def check_repeated(driver: CudaDriver) -> list[int]:
    """Compare the inputs of each repeated step with those that buffers get for it alone; return the steps' numbers."""
    device, counts = driver.runner.device, []
    forward, spec, tables = device.forward, driver.runner.device._forward._spec, device.tables
    limits = dataclasses.replace(driver.core.config.limits, max_num_batched_tokens=32)
    fresh = StepBuffers(HeadSizes.of(spec), limits, torch.float32, torch.device("cpu"))

    def checked(chunks: IntArray, masks: object = None, take: object = None) -> object:
        result, last, rows = forward(chunks, masks, take), device._last, device.rows  # type: ignore[arg-type]
        if last is None or not last.steps:
            return result
        counts.append(last.steps)
        alone = fresh.fill(last.inputs.shape, decodes_first(chunks), rows)
        wishes = fresh.fill_wishes(chunks[:, 0], chunks[:, 1] + 1, rows, spec.vocab_size)
        twins.begin_step(
            alone.control, alone.base, torch.zeros(1, dtype=torch.int32), alone.ids, alone.positions, alone.angles,
            alone.uniform, alone.decode,
        )  # fmt: skip
        count = len(chunks)
        for name in ("ids", "source", "positions", "angles", "rows", "sample_tokens", "sample_rows", "stored"):
            assert torch.equal(getattr(last.inputs, name), getattr(alone, name)), name
        for name in ("requests", "ranges", "items"):
            assert torch.equal(getattr(last.inputs.decode, name), getattr(alone.decode, name)), name
        if wishes.draws is not None:
            assert last.wishes.draws is not None
            assert all(map(torch.equal, wishes.draws, last.wishes.draws))
        entries = tables._entries_of(rows.tables[: len(tables.tables)])
        for row in chunks[:, 0].tolist():
            there = slice(0, int(rows.num_blocks[row]))
            assert (tables.tables[:, row, there].numpy() == entries[:, row, there]).all(), f"table of row {row}"
        assert count == last.count
        return result

    device.forward = checked  # type: ignore[method-assign, assignment]
    return counts


def test_a_full_table_and_more_changes_than_the_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.cuda.buffers._CHANGES", 6)
    decoder = make_decoder()
    request = make_request("long", np.random.default_rng(3).integers(0, POISON, 150).tolist(), 50)
    driver = driver_of(decoder, num_blocks=50, tokens=64)
    driver.add(request)
    driver.run()
    check_greedy(decoder, request, driver.outputs["long"])


def test_the_largest_step_can_be_rehearsed() -> None:
    """Padding alone: nothing is read or written in the pool, and the steps that follow are right."""
    decoder = make_decoder()
    driver = driver_of(decoder)
    driver.runner.device.run_padding(32, 12)
    driver.runner.device.warm_up()
    request = make_request("after", [4, 5, 6], 5)
    driver.add(request)
    driver.run()
    check_greedy(decoder, request, driver.outputs["after"])


@pytest.mark.parametrize(("options", "count"), [({}, 1), ({"scratch_blocks": 2}, 3)])
def test_a_paired_pool_has_one_table_on_the_device(options: dict[str, int], count: int) -> None:
    """Every change of a block sends one entry; V that lies elsewhere than behind its K is not sent at all."""
    limits, layers = Limits(2, 32, 64, num_units=12, block_size=4), 3
    pool = pool_of(12, layers, 4, 1, 8, **options)
    rows = RowTable(limits)
    tables = DeviceTables(rows, pool)
    (_, keys, values, *_), blocks = tables.view(pool.slices), rows.tables.shape[2]
    assert len(tables.tables) == count and (values is None) == (count == 1) == (tables.pair == layers)
    assert keys.data_ptr() == tables.tables.data_ptr()

    def give(*units: tuple[int, int]) -> None:
        entries = tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, pair) for pair in units)
        request = NewRequest(1, "r", (5,), 1, SamplingParams(1), entries)
        rows.apply(SchedulerOutput(0, (), (request,), released_rows=(1,)))

    give((7, 8), (2, 3))
    places, entries = tables.take_changes()
    assert places[:2].tolist() == [blocks, blocks + 1] and entries[:2].tolist() == [7 * layers, 2 * layers]
    assert len(places) == len(entries) == 2 * count
    assert count == 1 or entries[2:4].tolist() == [8 * layers, 3 * layers]
    give((7, 8), (3, 2))
    if count == 1:
        with pytest.raises(AssertionError, match="must follow its K"):
            tables.take_changes()
    else:
        assert tables.take_changes()[1][:4].tolist() == [7 * layers, 3 * layers, 8 * layers, 2 * layers]


class MetaTensors:
    def has(self, _name: str, /) -> bool:
        return True

    def fetch(self, _name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, device="meta")

    def fetch_bytes(self, _name: str, _shape: tuple[int, int]) -> None:
        return None


def test_a_capture_that_fails_keeps_the_graphs_that_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory for the largest the smaller ones may fit; where capture is refused all would be."""
    device = driver_of(make_decoder()).runner.device
    shapes = [shape.tokens for shape in device._buckets.all_shapes()]
    errors = {shapes[0]: torch.OutOfMemoryError("CUDA out of memory"), shapes[4]: RuntimeError("not permitted")}

    def capture(self: Graphs, inputs: StepInputs, *, adapted: bool) -> None:
        assert inputs is device._buffers.inputs(inputs.shape)
        if inputs.shape.tokens in errors:
            raise errors[inputs.shape.tokens]
        self._graphs[id(inputs), adapted] = object()  # type: ignore[assignment]

    monkeypatch.setattr(Graphs, "capture", capture)
    device._capture()
    kept = sum(size not in errors for size in shapes[: shapes.index(shapes[4])])
    assert 0 < kept == device.num_graphs < device.num_shapes
    assert f"{kept} of {len(shapes)} CUDA graphs" in caplog.text and "not permitted" in caplog.text


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 100, 1000])
@pytest.mark.parametrize("max_tokens", [1000, 8192])
def test_buckets_hold_every_step(max_num_seqs: int, max_tokens: int) -> None:
    buckets = Buckets(max_num_seqs, max_tokens)
    shapes = buckets.all_shapes()
    assert shapes == sorted(set(shapes), reverse=True)
    for count in range(1, max_num_seqs + 1):
        shape = buckets.fit(count, count)
        assert shape in shapes and shape.decodes == shape.tokens >= count and not shape.prefill
        assert shape.tokens <= max(count + 7, 1.25 * count)
    for tokens in (*range(2, 800), *range(800, max_tokens + 1, 37), min(GRAPH_TOKENS, max_tokens), max_tokens):
        for decodes in {0, min(tokens // 2, max_num_seqs), min(max_num_seqs - 1, tokens - 2)}:
            shape = buckets.fit(tokens, decodes)
            assert shape.prefill and shape.tokens >= tokens and shape.decodes >= decodes
            assert shape.samples >= min(decodes + 1, tokens, max_num_seqs)
            assert (shape in shapes) == (tokens <= GRAPH_TOKENS) and shape.exact != (shape in shapes)
            assert shape.tokens <= max(tokens + 63, 1.25 * tokens)


def test_draw_keeps_greedy_and_invalid_rows_and_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 5)
    logits[3, 0] = float("nan")
    greedy = torch.tensor([1, 1, 1, -1, 1], dtype=torch.int32)
    inputs = DrawInputs(
        uniform=torch.tensor([0.9, 0.0, 0.999, 0.5, 0.98], dtype=torch.float64),
        temperature=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 1, 1, 1, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5]),
        min_p=torch.zeros(5),
    )
    # greedy; both of two equal logits pass a top-k of one; not finite; and both pass a top-p that one would fill
    assert twins.draw(logits, greedy, *inputs).tolist() == [1, 1, 2, -1, 2]
