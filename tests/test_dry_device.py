"""Every family and every kind of step on a device that runs nothing: no step waits for it, or for the compiler."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import pytest
import torch
from devices import pool_of
from dry_device import META, DryDevice, WouldCompileError, WouldWaitError, dry_device
from support.tables import mostly_slow
from test_cuda_runner import MetaTensors
from tiny_models import FAMILY_CASES, FEW_FAMILIES, model_folder

from engine.api import SamplingParams
from engine.arrays import IntArray
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.execution import stream
from engine.execution.cuda import buffers
from engine.execution.cuda.device import LARGEST_RANK, CudaDevice, Sampling
from engine.execution.cuda.forward import Forward
from engine.execution.cuda.kernel_check import with_twins
from engine.execution.cuda.modules import KernelAttention
from engine.execution.cuda.swap import PinnedCache
from engine.execution.masks import FinishMasks, StepMasks
from engine.execution.pool import PoolOptions
from engine.execution.rows import RowTable, chunk_array, decodes_first
from engine.execution.runner import Runner
from engine.forms import Grammar
from engine.limits import Limits
from engine.models.attention import PLAIN, HeadSizes, Manner
from engine.models.lora import Delta, Site
from engine.models.spec import ModelSpec, hidden_state_refusal, load_spec
from engine.models.weights import build_weights
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, ReplacedEntry, SchedulerOutput
from engine.triton_kernels import Kernels, triton_kernels, twins

pytest.importorskip("triton")
BLOCK, ROWS = 4, 3
_NO_CHUNKS = np.zeros((0, 4), dtype=np.int64)
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "drawn, top-p, top-k, min-p": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    "bias and least length": {"logit_bias": ((3, 1.0),), "min_tokens": 30, "stop_token_ids": frozenset({2})},
    "log-probabilities": {"logprobs": 5},
    "all of them": {"top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": ((3, 1.0),), "logprobs": 5},
    "masks": {"temperature": 0.0, "grammar": Grammar("json", "")},
    "masks and all kinds": {"grammar": Grammar("json", ""), "presence_penalty": 1.0, "logprobs": 5, "top_k": 3},
    "swapped out and in": {"temperature": 0.0},
    "from hidden state": {"temperature": 0.0},
    "restored": {"temperature": 0.0},
}
"""Kinds of steps, and the options of their requests."""
EDITS = {"presence_penalty", "frequency_penalty", "logit_bias", "grammar"}
"""Wishes for which no step repeats the one before."""


def kv(first: int, tier: Tier = Tier.DEVICE) -> CacheEntry:
    return CacheEntry(CacheKind.KV, tier, (first, first + 1))


def hidden(unit: int) -> CacheEntry:
    return CacheEntry(CacheKind.HIDDEN, Tier.DEVICE, (unit,))


class Masks:
    """Stands for `RowMasks`: one token of the vocabulary may come next, the last row's mask is late, and two tokens
    must follow the first row's."""

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // 32)

    def start(self, where: IntArray, ends: IntArray, alone: bool) -> FinishMasks:
        places, none = np.arange(len(where) - 1), np.zeros(0, dtype=np.int64)
        bits = np.ones((len(places), self._words), dtype=np.int32)
        return lambda: StepMasks(places, bits, np.array([len(where) - 1]), none, {0: (5, 6)})


def make_runner(
    spec: ModelSpec,
    *,
    graphs: bool = True,
    tokens: int = 32,
    adapted: bool = False,
    host_units: int = 8,
    kernels: Kernels | None = None,
    **pool: Unpack[PoolOptions],
) -> Runner[CudaDevice]:
    """`adapted`: under LoRA adapters."""
    limits = Limits(4, tokens, 64, num_units=60, block_size=BLOCK)
    scratch = 0 if hidden_state_refusal(spec) else 12
    with torch.inference_mode():
        weights = build_weights(spec, MetaTensors())
    runner = Runner(
        CudaDevice(
            spec, weights, kernels or triton_kernels(), limits, graphs=graphs, scratch_blocks=scratch,
            host_units=host_units, adapted=adapted, **pool,
        )
    )  # fmt: skip
    runner.masks = Masks(spec.vocab_size)  # type: ignore[assignment]
    return runner


def operations(kind: str) -> tuple[CacheOperation, ...]:
    if kind == "swapped out and in":
        out, back = kv(50), kv(0, Tier.HOST)
        return (CacheOperation(CacheAction.SWAP_OUT, out, back), CacheOperation(CacheAction.SWAP_IN, back, kv(52)))
    if kind == "restored":
        return (CacheOperation(CacheAction.RESTORE, hidden(40), kv(42), 0),)
    return ()


def steps_of(kind: str, rows: int = ROWS, adapters: Sequence[int] = (0,) * ROWS) -> list[SchedulerOutput]:
    """Prompts, decodes, decodes beside another prompt, decodes: the last but one is mixed. The last has `rows`."""
    params = SamplingParams(**{"max_tokens": 40, **KINDS[kind]})  # type: ignore[arg-type]

    def new(row: int) -> NewRequest:
        first = 16 * row
        entries = (
            [hidden(first + block) for block in range(4)]
            if "hidden" in kind
            else [kv(first + 2 * block) for block in range(4)]
        )
        return NewRequest(row, f"r{row}", (5, 6, 7, 8, 9), 5, params, tuple(entries), adapter=adapters[row])

    before = tuple(range(rows - 1))
    prompts = SchedulerOutput(0, tuple(Chunk(row, 0, 5, True) for row in before), tuple(map(new, before)))
    decodes = [SchedulerOutput(n, tuple(Chunk(row, 4 + n, 1, True) for row in before)) for n in (1, 2)]
    late = (*(Chunk(row, 7, 1, True) for row in before), Chunk(rows - 1, 0, 5, True))
    moved = {"operations": operations(kind)}
    mixed = SchedulerOutput(3, late, (new(rows - 1),), **moved)  # type: ignore[arg-type]
    last = (*(Chunk(row, 8, 1, True) for row in before), Chunk(rows - 1, 5, 1, True))
    return [prompts, *decodes, mixed, SchedulerOutput(4, last, **moved)]  # type: ignore[arg-type]


def counts_of(
    dry: DryDevice,
    runner: Runner[CudaDevice],
    kind: str,
    rows: int = ROWS,
    adapters: Sequence[int] = (0,) * ROWS,
) -> list[Counter[str]]:
    """Of each launch; every step is launched while the one before it runs, and nothing but their ends is waited for;
    for masks, which follow from the last step's tokens, that step is waited for while this one runs."""
    counts, collects = [], []
    dry.step += 3  # earlier launches have ended
    steps = steps_of(kind, rows, adapters)
    for step in steps:
        dry.step, dry.strict, dry.counts = dry.step + 1, "masks" not in kind, Counter()
        collects.append(runner.launch(step))
        counts.append(dry.counts)
        dry.strict = False
        if len(collects) > 1:
            assert len(collects[-2]().token_ids) == len(steps[step.step_id - 1].chunks)
        assert not dry.counts["blocking"], "results are copied while their step runs"
    return counts


def kinds_of(spec: ModelSpec, *, int8: bool = False) -> list[str]:
    """The steps that a model may meet: with a cache of 8 bits none from hidden state."""
    left_out = ("from hidden state", "restored") if int8 or hidden_state_refusal(spec) else ()
    return [kind for kind in KINDS if kind not in left_out]


@pytest.mark.parametrize("name", mostly_slow(FAMILY_CASES, FEW_FAMILIES))
def test_no_step_waits_for_the_device_or_the_compiler(name: str) -> None:
    spec = load_spec(model_folder(name))
    with dry_device() as dry:
        runner = make_runner(spec)
        assert runner.device.num_graphs == runner.device.num_shapes
        assert dry.counts["graphs"] == runner.device.num_graphs, "each went to the device once before any step"
        dry.sealed = True
        for kind in kinds_of(spec):
            counts = counts_of(dry, runner, kind)
            assert [each["graphs"] for each in counts] == [int("hidden" not in kind)] * len(counts)
            repeats = "hidden" not in kind and not KINDS[kind].keys() & EDITS
            assert (counts[2]["numbers of uploads"] == 4) is repeats, "the decodes of the step before"
            if kind in ("swapped out and in", "restored", "from hidden state") or "masks" in kind:
                continue
            copies = counts[-1]["uploads"], counts[-1]["fetches"], counts[-1]["pins"]
            assert copies == (1, 1 + ("logprobs" in KINDS[kind]), 0), "one copy each way, and one for log-probabilities"


@pytest.mark.parametrize("name", ["llama-gqa2", "llama-mha-tied"])
def test_a_streamed_cache_is_loaded_and_saved_without_a_wait(name: str) -> None:
    """Layer by layer: in a step of decodes each loads and saves the blocks of its rows."""
    spec = load_spec(model_folder(name))
    with dry_device() as dry:
        runner = make_runner(spec, graphs=False, host_units=0, store=partial(PinnedCache, META))
        plain = make_runner(spec, graphs=False)
        dry.sealed = True
        for kind in (each for each in kinds_of(spec) if not operations(each)):
            streamed, resident = counts_of(dry, runner, kind), counts_of(dry, plain, kind)
            for mine, theirs in zip(streamed[1:3], resident[1:3], strict=True):
                assert not mine["graphs"] and mine["kernels"] == theirs["kernels"]
                assert mine["uploads"] == theirs["uploads"] + spec.num_layers, "the rows' blocks are side by side"
                assert mine["fetches"] == theirs["fetches"] + (ROWS - 1) * spec.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa2", "qwen3", "opt", "neox"])
def test_no_twin_in_a_graph_or_a_draw_waits_for_the_device(name: str) -> None:
    waiting = twins.WAITING | {"hidden_gather", "hidden_write", "unit_copy"}
    spec, kernels = load_spec(model_folder(name)), with_twins(triton_kernels(), [*{*twins.__all__} - waiting])
    with dry_device() as dry:
        runner = make_runner(spec, kernels=kernels)
        assert runner.device.num_graphs == runner.device.num_shapes
        for kind in KINDS:
            if "hidden" not in kind and not operations(kind):
                assert all(each["graphs"] for each in counts_of(dry, runner, kind))


def test_swaps_lock_the_host_memory_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of blocks over several pieces of host memory, most without a copy before."""
    monkeypatch.setattr(stream, "LOCKED_BYTES", 1)
    with dry_device() as dry:
        runner = make_runner(load_spec(model_folder("llama-gqa2")), host_units=400)
        host = runner.device.pool.host
        assert len(host._missing) > 20
        first = 7 * host.per_piece - 3
        blocks = [(kv(2 * place), kv(first + 2 * place, Tier.HOST)) for place in range(20)]
        operations = [CacheOperation(CacheAction.SWAP_OUT, *pair) for pair in blocks]
        operations += [CacheOperation(CacheAction.SWAP_IN, *pair[::-1]) for pair in blocks]
        dry.strict = True
        runner.launch(SchedulerOutput(0, (), operations=tuple(operations)))
        pieces = {unit // host.per_piece for unit in range(first, first + 40)}
        assert len(pieces) > 1 and not pieces & host._missing


def test_a_repeated_step_uploads_the_changed_blocks_only() -> None:
    """A block of hidden state makes it another step."""
    with dry_device() as dry:
        runner, sizes = make_runner(load_spec(model_folder("llama-mha-tied"))), []
        new, moved = (AppendedEntries(0, (kv(40),)),), (ReplacedEntry(1, 0, kv(42)),)
        chunks = [tuple(Chunk(row, at, 1, True) for row in range(ROWS - 1)) for at in (7, 8, 9)]
        steps = [*steps_of("greedy")[:3], SchedulerOutput(3, chunks[0], appended=new, replaced=moved)]
        steps.append(SchedulerOutput(4, chunks[1], appended=(AppendedEntries(0, (hidden(44),)),)))
        for step in (*steps, SchedulerOutput(5, chunks[2])):
            dry.step, dry.counts = dry.step + 1, Counter()
            runner.launch(step)
            sizes.append(dry.counts["numbers of uploads"])
        assert sizes[2:4] == [4, 4 + 2 * 2 * len(runner.device.tables.tables)] and min(sizes[4:]) > 100


@pytest.mark.parametrize("graphs", mostly_slow([True, False], [True]))
@pytest.mark.parametrize("name", mostly_slow(["llama-gqa2", "neox", "gemma3"], ["llama-gqa2"]))
def test_decodes_with_adapters_replay_a_graph(name: str, graphs: bool) -> None:
    """One for rows of any adapters and of none, which launches, copies and waits for as much as one without. Prompts
    among such rows run without, and so do rows of an adapter that no slot holds."""
    spec = load_spec(model_folder(name))
    with dry_device() as dry:
        runner = make_runner(spec, graphs=graphs, adapted=True)
        device, decodes = runner.device, len(buffers.decode_buckets(4))
        assert device.num_graphs == (device.num_shapes if graphs else 0)
        assert device.num_shapes == len(buffers.mixed_buckets(32)) + 2 * decodes
        for number, rank in ((1, 3), (2, 8), (3, LARGEST_RANK + 1)):
            device.adapt(number, deltas_of(spec, rank))
        dry.sealed = True
        for kind in ("greedy", "all of them"):
            plain = counts_of(dry, runner, kind)
            adapted = counts_of(dry, runner, kind, adapters=(1, 0, 2))
            replayed = [1, 2, 4]  # steps of decodes alone
            assert [each["graphs"] for each in adapted] == [int(graphs and i in replayed) for i in range(5)]
            for index in replayed:
                mine, theirs = adapted[index], plain[index]
                counted = ("graphs", "uploads", "fetches", "pins", "operators", "blocking")
                assert [mine[name] for name in counted] == [theirs[name] for name in counted] and not mine["blocking"]
                more = 0 if graphs else 2 * 4 * spec.num_layers  # two for each matrix of a layer
                assert mine["kernels"] == theirs["kernels"] + more
            large = counts_of(dry, runner, kind, adapters=(3, 0, 1))
            assert [each["graphs"] for each in large] == [0] * 5


def deltas_of(spec: ModelSpec, rank: int) -> dict[Site, Delta]:
    """Of the attention's inputs in each layer."""
    width = spec.q_size + 2 * spec.kv_size
    a, b = (torch.empty(*shape, device="meta") for shape in ((rank, spec.hidden_size), (width, rank)))
    return {Site(layer, "qkv"): Delta(a, b) for layer in range(spec.num_layers)}


def test_nothing_is_compiled_for_steps_of_any_size_without_graphs() -> None:
    """Nor for odd sizes of gathers, restores and swaps."""
    spec = load_spec(model_folder("llama-mha-tied"))
    with dry_device() as dry:
        runner = make_runner(spec, graphs=False, tokens=11)
        dry.sealed = True
        for kind in ("all of them", "masks", "swapped out and in", "from hidden state", "restored"):
            counts_of(dry, runner, kind, rows=2)
        pairs = np.arange(8)[:, None].repeat(2, axis=1)
        for count in range(1, 8):
            units = np.arange(3 * count).reshape(count, 3)
            with torch.inference_mode():
                runner.device.restore(units, np.arange(count) * BLOCK)
                runner.device.swap_out(pairs[:count])
                runner.device.swap_in(pairs[:count])


class MetaMemory:
    """See PoolMemory."""

    def __init__(self, num_bytes: int, spare_bytes: int) -> None:
        self.tensor = torch.empty(num_bytes + spare_bytes, dtype=torch.uint8, device=META)

    def back(self, num_bytes: int) -> None: ...

    def give_back(self, num_bytes: int) -> None: ...


class Halved:
    """See NextStage: takes steps in two micro-batches where it may, and passes on to `follower`."""

    def __init__(self, rows: RowTable, follower: CudaDevice) -> None:
        self._rows, self._follower = rows, follower
        self._came: list[torch.Tensor] = []

    def cut(self, chunks: IntArray, *, whole: bool) -> list[IntArray]:
        return [chunks] if whole or len(chunks) < 2 else [chunks[:1], chunks[1:]]

    def send(self, chunks: IntArray, hidden: torch.Tensor, wanted: IntArray) -> None:
        assert hidden.device.type == "cpu" and hidden.shape[1] == chunks[:, 2].sum()
        blocks = int(self._rows.num_blocks[chunks[:, 0]].max())
        first = chunks[:, 0]
        self._follower.rows.mirror(self._rows.tables[:2, first, :blocks], self._rows.is_long[first])
        renamed = np.column_stack((np.arange(len(chunks)), chunks[:, 1:]))
        self._came.append(self._follower.pass_through(renamed, hidden, wanted))
        assert self._came[-1].shape == (1, len(wanted), hidden.shape[2])

    def answers(self) -> Callable[[], list[torch.Tensor]]:
        came, self._came = self._came, []
        return lambda: came


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "opt"])
def test_stages_of_a_pipeline_compile_nothing_and_copy_through_pinned_memory(name: str) -> None:
    """They wait for the transfer to the other engine only; whole again they replay the graphs that they
    had."""
    spec = load_spec(model_folder(name))
    every, half = range(spec.num_layers), spec.num_layers // 2
    with dry_device() as dry:
        devices = []
        for _ in range(2):
            with torch.inference_mode():
                weights = build_weights(spec, MetaTensors())
            limits, spare = Limits(4, 32, 64, num_units=60, block_size=BLOCK), {"spare_bytes": 2**20}
            devices.append(
                CudaDevice(spec, weights, triton_kernels(), limits, graphs=True, reserve=MetaMemory, **spare)  # type: ignore[arg-type]
            )
        leader, follower = devices
        runner = Runner(leader)
        runner.masks = Masks(spec.vocab_size)  # type: ignore[assignment]
        kinds = [kind for kind in kinds_of(spec, int8=True) if "swapped" not in kind]
        for kind in kinds:
            counts_of(dry, runner, kind)
        for device, layers in zip(devices, (every[:half], every[half:]), strict=True):
            device.pool.relay(layers, 70)
            device.keep(layers)
        leader.beyond = Halved(leader.rows, follower)  # type: ignore[assignment]
        dry.sealed = True
        for kind in kinds:
            dry.step += 3
            for step in steps_of(kind):
                dry.step, dry.counts = dry.step + 1, Counter()
                runner.launch(step)()
                parts = min(2, len(step.chunks))
                assert not dry.counts["blocking"] and not dry.counts["graphs"]
                # of each micro-batch: the step, here and there, its input and output there; and the result
                assert dry.counts["uploads"] >= 3 * parts + 2 and dry.counts["fetches"] >= 2 * parts + 1
        leader.beyond = None
        leader.pool.relay(every, 60)
        leader.keep(every)
        for kind in kinds:
            assert [each["graphs"] for each in counts_of(dry, runner, kind)] == [1] * 5


def test_a_step_that_would_wait_for_the_compiler_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "warm_up", lambda self: None)
    spec = load_spec(model_folder("llama-mha-tied"))
    for kind in ("drawn", "masks", "swapped out and in", "restored"):
        with dry_device() as dry:
            runner = make_runner(spec)
            dry.sealed = True
            with pytest.raises(WouldCompileError):
                counts_of(dry, runner, kind)


PAGE = Path(__file__).parents[1] / "docs" / "develop" / "kernels.md"
LAUNCHING = ("llama-gqa2", "qwen3", "gemma3", "opt", "neox")
"""One family for each shape of a layer."""


def launches_of(spec: ModelSpec, tokens: int, arch: int = 90) -> tuple[list[str], list[str]]:
    """Return the launches of a step of two decodes, or of `tokens` with prompts among them, in a layer and outside of
    the layers: Triton kernels and operators of torch, by name."""
    found: list[list[str]] = []
    for num_layers in (1, 2):
        with dry_device(arch) as dry:
            few = replace(spec, num_layers=num_layers, windows=spec.windows[:num_layers])
            device = make_runner(few, graphs=False).device
            inputs = device._buffers.fill(device._buckets.fit(tokens, 2), decodes_first(_NO_CHUNKS), device.rows)
            dry.launched.clear()
            with torch.inference_mode():
                device._run(inputs, adapted=False)
            found.append(dry.launched)
    one, two = found
    first = one.index("embed_kernel") + 1
    layer = two[first : first + len(two) - len(one)]
    outside = one[:first] + one[first + len(layer) :]
    assert two == [*outside[:first], *layer, *layer, *outside[first:]]
    return layer, outside


@pytest.mark.parametrize("name", LAUNCHING)
def test_launches_of_a_step(name: str) -> None:
    """Nine in a layer, and two more where there are prompts, which the decode kernel does not attend to."""
    spec = load_spec(model_folder(name))
    layer, outside = launches_of(spec, 2)
    assert (len(layer), len(outside)) == (9, 7) and "split_kernel" in layer
    mixed, same = launches_of(spec, 20)
    assert ["begin_kernel", *same] == outside
    assert [each for each in mixed if each not in ("prefill_kernel", "merge_kernel")] == layer
    assert len(mixed) == 11
    kernels = {each.removesuffix("_kernel") for each in (*mixed, *outside) if each.endswith("_kernel")}
    assert all(f"**{kernel}**" in PAGE.read_text() for kernel in kernels)


MUTANTS = {
    "a value is looked at": (Forward, "accept", lambda tensor: int(tensor.sum())),
    "a copy to the host": (Forward, "accept", lambda tensor: tensor.cpu()),
    "a tensor of the host": (Forward, "accept", lambda tensor: tensor + torch.ones(len(tensor), dtype=torch.int32)),
    "a value is looked at, in a draw": (Sampling, "choose", lambda tensor: bool((tensor > 3).any())),
    "a copy from pageable memory": (Sampling, "choose", lambda tensor: torch.ones(len(tensor)).to(tensor.device)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_would_wait_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, spoil = MUTANTS[mutant]
    original = getattr(owner, method)
    with dry_device() as dry:
        runner = make_runner(load_spec(model_folder("llama-gqa2")))

        def mutated(self: object, first: object, second: torch.Tensor, *others: object) -> object:
            spoil(second)
            return original(self, first, second, *others)

        monkeypatch.setattr(owner, method, mutated)
        with pytest.raises((WouldWaitError, RuntimeError, NotImplementedError)):
            counts_of(dry, runner, "penalties")


def test_nothing_is_compiled_for_a_chunk_behind_a_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of no bucket the splits of its past are merged, in one without such a past nothing is launched."""
    monkeypatch.setattr(buffers, "GRAPH_TOKENS", 4)
    spec, blocks = load_spec(model_folder("llama-gqa2")), 400
    with dry_device() as dry:
        limits = Limits(4, 11, BLOCK * blocks, num_units=2 * blocks + 9, block_size=BLOCK)
        with torch.inference_mode():
            weights = build_weights(spec, MetaTensors())
        runner = Runner(CudaDevice(spec, weights, triton_kernels(), limits, graphs=False))
        dry.sealed = True
        dry.step += 3  # earlier launches have ended
        params = SamplingParams(max_tokens=40, temperature=0.0)
        tokens, entries = tuple([5] * 1400), tuple(kv(2 * block) for block in range(blocks))
        request = NewRequest(0, "long", tokens, len(tokens), params, entries)
        kernels = []
        for number, start in enumerate((0, 1380)):
            dry.step, dry.strict, dry.counts = dry.step + 1, True, Counter()
            runner.launch(SchedulerOutput(number, (Chunk(0, start, 9, False),), (request,) if not number else ()))
            kernels.append(dry.counts["kernels"])
            dry.strict = False
        assert kernels[1] == kernels[0] + spec.num_layers


def module_layers() -> list[tuple[HeadSizes, Manner]]:
    """Layers of one model that differ in all that decides on launches: K wider than V, fewer heads with a window
    and a cap, and sinks."""
    sinks = torch.zeros(8, dtype=torch.bfloat16, device=META)
    return [
        (HeadSizes(4, 4, 192, 128), PLAIN),
        (HeadSizes(8, 2, 64, 64), Manner(0.1, 7, 30.0)),
        (HeadSizes(8, 2, 64, 64), Manner(sinks=sinks)),
    ]


@pytest.mark.parametrize("arch", [80, 90])
def test_modules_wait_for_nothing_and_compile_nothing_once_their_heads_are_known(arch: int) -> None:
    with dry_device(arch) as dry, torch.inference_mode():
        limits, layers = Limits(4, 32, 64, num_units=60, block_size=BLOCK), module_layers()
        pool = pool_of(60, len(layers), BLOCK, 4, 192, torch.bfloat16, META)
        rows = RowTable(limits)
        attention = KernelAttention(triton_kernels(), pool, rows, limits)
        for heads, manner in layers:
            attention.warm_up(heads, manner)
        dry.sealed = dry.strict = True
        launches = []
        for step in steps_of("greedy"):
            dry.step, dry.counts = dry.step + 1, Counter()
            rows.apply(step)
            tokens = len(attention.begin(chunk_array(step.chunks)).positions)
            for layer, (heads, manner) in enumerate(layers):
                sizes = ((heads.heads, heads.head_dim), (heads.kv_heads, heads.head_dim))
                q, k = (torch.empty((tokens, *size), dtype=pool.dtype, device=META) for size in sizes)
                v = torch.empty((tokens, heads.kv_heads, heads.value_dim), dtype=pool.dtype, device=META)
                out = attention(layer, q, k, v, manner)
                assert out.shape == (tokens, heads.heads * heads.value_dim)
            assert not dry.counts["blocking"] and dry.counts["uploads"] == len({heads for heads, _ in layers})
            launches.append(dry.counts["kernels"] / len(layers))
        assert launches == [2, 2, 2, 3, 2]  # prompts; decodes; both
