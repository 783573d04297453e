"""An engine whose layers are divided among processes: it answers as one process does, and ends as a whole when one of
them does, so that its requests go on in the next."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import devices
import numpy as np
import pytest
import tiny_models
import torch
from cuda_engine import BLOCK
from devices import BACKENDS, linear_of
from driver import Driver, has_ended, make_request, outputs_of, submit_one
from fakes.speculation import Oracle
from test_build import shape
from test_families import assert_equal_but_for_ties, prompts_of
from torch import distributed

from engine import build, openmp
from engine.api import EngineRequest, EngineState, SamplingParams
from engine.cache.blocks import CacheAction
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailableError, ModelLoadError
from engine.execution.cpu import backend
from engine.execution.cpu.native import is_built
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cuda.backend import CudaBackend
from engine.execution.layout import RankStep
from engine.execution.ranks import leader, messages
from engine.execution.ranks.group import Follower, RankGroup
from engine.execution.ranks.leader import Leader
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.forms import Pooling
from engine.limits import SchedulerConfig
from engine.machine.facts import Processor
from engine.models.checkpoint import load_weights
from engine.models.sharding import Shard
from engine.models.spec import load_spec
from engine.process.client import EngineProcess
from engine.process.launcher import ProcessOptions
from engine.process.requests import RestartPolicy
from engine.scheduling.output import SchedulerOutput

CPU = torch.device("cpu")
NATIVE = pytest.mark.skipif(not is_built(), reason="no native kernels here")
OUTPUT = 12
PROMPT, WISHES = tuple(range(3, 20)), SamplingParams(60, temperature=0.8, seed=7)


def config_of(case: str = "llama-gqa2", ranks: int = 2, **changes: Any) -> EngineConfig:
    """A pool that is too small for all requests at once."""
    common: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "kernels": "torch", "threads": 1,
        "num_gpu_blocks_override": 34, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 100,
        "profile_seconds": 0.0, "self_test": False,
    }  # fmt: skip
    folder = str(tiny_models.model_folder(case)) if case else ""
    return EngineConfig(**common | {"model": folder, "tensor_parallel_size": ranks} | changes)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.plan.BLOCK_SIZE", 4)


@contextmanager
def driver_of(config: EngineConfig) -> Iterator[Driver]:
    runner, plan = build.build_runner(config, build.plan_launch(config))
    try:
        yield Driver(runner, build.scheduler_config(config, plan))
    finally:
        if runner.ranks is not None:
            runner.ranks.close()


def generate(driver: Driver, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Every other request is sampled, with a seed; some repeat forbidden tokens. Then come texts
    whose vectors are wanted, for which a step computes all tokens to the end."""
    for index, prompt in enumerate(prompts):
        wishes = {"temperature": 1.0, "seed": index, "presence_penalty": index % 4 / 2} if index % 2 else {}
        driver.add(make_request(str(index), prompt, OUTPUT, **wishes))
        driver.step()
    driver.run()
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0, "the pool was meant to be too small"
    assert stats.prefix_hit_tokens > 0
    wish = SamplingParams(max_tokens=1, temperature=0.0)
    for index in range(3):
        text = tuple(range(5 + index, 45 + index))
        driver.add(EngineRequest(f"vector {index}", text, wish, pooling=Pooling.MEAN))
        driver.add(make_request(f"beside {index}", prompts[-1], OUTPUT))
    driver.run()
    return driver.outputs


def assert_vectors_equal(found: Driver, alone: Driver) -> None:
    for index in range(3):
        vectors = [np.frombuffer(each.finals[f"vector {index}"].embedding or b"", "<f4") for each in (found, alone)]
        assert len(vectors[0]) > 1
        np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-3)


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "case", "options"),
    [
        pytest.param("auto", "gemma2", {"kv_cache_dtype": "int8"}, marks=NATIVE),
        ("torch", "llama-gqa2", {"swap_space": 0.01, "self_test": True}),
    ],
    ids=["int8", "swap"],
)
def test_two_processes_equal_one(kernels: str, case: str, options: dict[str, Any]) -> None:
    prompts, options = prompts_of(97), options | {"kernels": kernels}
    with driver_of(config_of(case, 1, **options)) as one:
        alone = generate(one, prompts)
    with driver_of(config_of(case, **options)) as driver:
        found = generate(driver, prompts)
        moved = {operation.action for step in driver.steps for operation in step.operations}
        assert isinstance(driver.runner.device, NativeDevice) == (kernels == "auto")
    assert found == alone
    assert_vectors_equal(driver, one)
    assert (CacheAction.SWAP_IN in moved) == ("swap_space" in options), "the kept blocks are in parts on both"
    for index in range(0, len(prompts), 2) if case == "llama-gqa2" else ():
        assert_equal_but_for_ties(case, prompts[index], found[str(index)])


async def answer(engine: Any, name: str) -> list[int]:
    (output,) = [each async for each in outputs_of(engine, EngineRequest(name, PROMPT, WISHES, final_only=True))]
    assert output.error is None, output.error
    return list(output.token_ids)


def rank_of(engine: int) -> int:
    """The process with the other rank of the engine that runs in this one."""
    found = []
    for entry in (each / "stat" for each in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            command = (entry.parent / "cmdline").read_bytes().split(b"\0")
            if leader.CHILD.encode() in command and int(entry.read_text().rpartition(")")[2].split()[1]) == engine:
                found.append(int(entry.parent.name))
    (rank,) = found
    return rank


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(6000):
        if await done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come")


async def until_ended(pid: int) -> None:
    async def done() -> bool:
        return has_ended(pid)

    await until(done)


@pytest.mark.slow
async def test_with_a_rank_the_engine_ends_and_its_requests_go_on(tmp_path: Path) -> None:
    """Killed before the first token of a stream, in the middle of one, and while nothing runs."""
    pid_file = tmp_path / "engine.pid"
    engine = EngineProcess(config_of(), ProcessOptions(policy=RestartPolicy(max_delay=0.05), pid_file=pid_file))

    def rank() -> int:
        return rank_of(int(pid_file.read_text()))

    async def restarted(**causes: int) -> None:
        async def done() -> bool:
            return (await engine.stats()).restarts == causes and engine.state is EngineState.READY

        await until(done)

    await engine.start()
    try:
        undisturbed = await answer(engine, "undisturbed")
        request = EngineRequest("stream", PROMPT, WISHES)
        os.kill(rank(), signal.SIGSTOP)
        stream = await submit_one(engine, request)
        os.kill(rank(), signal.SIGKILL)
        assert [token async for output in stream for token in output.token_ids] == undisturbed
        assert (await engine.stats()).resumed_requests == 1
        await restarted(device=1)
        found: list[int] = []
        async for output in await submit_one(engine, request):
            if not found:
                os.kill(rank(), signal.SIGKILL)
            found += output.token_ids
        assert found == undisturbed
        await restarted(device=2)
        os.kill(rank(), signal.SIGKILL)
        await restarted(device=3)
        left = rank()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        await until_ended(left)
        await restarted(device=3, killed=1)
        assert await answer(engine, "later") == undisturbed
        left = rank()
    finally:
        await engine.stop()
    await until_ended(left)


@pytest.mark.slow
async def test_an_engine_in_this_process_is_dead_without_a_rank() -> None:
    engine = build.build_engine(config_of())
    dead = asyncio.Event()
    engine.on_death = lambda _cause, _why: dead.set()
    await engine.start()
    try:
        assert len(await answer(engine, "alive")) == WISHES.max_tokens
        os.kill(rank_of(os.getpid()), signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), 60.0)
        assert "rank 1 ended (signal 9)" in (engine.trouble or "") and engine.state is EngineState.DEAD
    finally:
        await engine.stop()


@pytest.mark.slow
def test_ranks_end_where_no_engine_comes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def fail(*_: Any, **__: object) -> None:
        found.append(rank_of(os.getpid()))
        raise ConfigError("no engine")

    monkeypatch.setattr("engine.build.join.make_controller", fail)
    with pytest.raises(ConfigError, match="no engine"):
        build.build_engine(config_of())
    assert has_ended(*found)


@pytest.mark.slow
def test_a_step_that_failed_on_one_rank_is_the_last() -> None:
    """The other waits for it in a sum: whatever failed, only a new start brings them together."""
    with driver_of(config_of()) as driver:
        runner: Any = driver.runner
        driver.add(make_request("a", [5, 6, 7], 8))
        driver.step()
        assert runner.lost() is None

        def fail(*_: Any) -> None:
            raise MemoryError

        runner.device.forward = fail
        with pytest.raises(MemoryError):
            runner.launch(driver.steps[-1])
        assert "failed on the first rank only" in runner.lost()


@pytest.mark.slow
def test_a_rank_that_fails_says_why() -> None:
    with driver_of(config_of()) as driver:
        heard: list[str] = []
        said = threading.Event()
        runner: Any = driver.runner
        runner.ranks.watch(lambda why: (heard.append(why), said.set()))
        row = replace(SchedulerOutput(1, ()), released_rows=(99,))
        with pytest.raises(IndexError):
            runner.launch(row)
        runner.ranks.begin(row, runner.device.rows)
        assert said.wait(60.0) and heard == [runner.lost()]
        assert heard[0].startswith("rank 1: IndexError: index 99")
        again: list[str] = []
        runner.ranks.watch(again.append)
        assert again == heard, "a late call is answered, too"


# The start ------------------------------------------------------------------------------------------------------------


class ForeignLeader(Leader):
    """The others are to load what is not there."""

    others: ClassVar[dict[str, Any]] = {"model": "/no/such/folder"}

    def __init__(self, config: EngineConfig, *args: Any) -> None:
        super().__init__(replace(config, **self.others), *args)


@pytest.mark.slow
@NATIVE
def test_ranks_that_run_by_different_kernels_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they add would be of other types and strides."""
    monkeypatch.setattr(ForeignLeader, "others", {"kernels": "torch"})
    monkeypatch.setattr(leader, "Leader", ForeignLeader)
    config = config_of(kernels="auto")
    with pytest.raises(ConfigError, match="ranks use different kernels"):
        build.build_runner(config, build.plan_launch(config))


@pytest.mark.slow
@NATIVE
def test_ranks_keep_the_threads_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that measure how many are best would wait for others that run none."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(backend, "choose_threads", lambda *_: pytest.fail("a step of one rank alone"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = config_of(kernels="auto", threads=None, profile_seconds=1.0)
        runner, plan = build.build_runner(config, build.plan_launch(config))
    finally:
        torch.set_num_threads(before)
    assert runner.ranks is not None
    runner.ranks.close()
    assert plan.threads == 2


@pytest.mark.slow
def test_what_keeps_another_rank_from_its_start_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    spawn = leader.subprocess.Popen

    def keep(*args: Any, **kwargs: Any) -> Any:
        started.append(spawn(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(leader.subprocess, "Popen", keep)
    config = config_of(ranks=4, case="llama-mha-tied")
    with monkeypatch.context() as patch:
        patch.setattr(leader, "Leader", ForeignLeader)
        with pytest.raises(ModelLoadError, match="/no/such/folder"):
            build.build_runner(config, build.plan_launch(config))
    monkeypatch.setattr(leader, "CHILD", "engine.no.such.module")
    config = config_of()
    with pytest.raises(EngineUnavailableError, match=r"rank 1 ended \(exit code 1\)"):
        build.build_runner(config, build.plan_launch(config))
    assert len(started) == 4 and all(each.returncode is not None for each in started), "a process is left"


def test_all_ranks_have_the_least_of_what_one_has() -> None:
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: RankGroup(store, rank, 2, CPU, nccl=False), range(2)))
        found = list(threads.map(lambda pair: pair[0].least(pair[1]), zip(groups, ([5, 9], [7, 3]), strict=True)))
        assert found == [[5, 3], [5, 3]]
        shared = [torch.tensor([7]), torch.tensor([8])]
        list(threads.map(lambda pair: pair[0].share(pair[1]), zip(groups, shared, strict=True)))
        assert shared == [torch.tensor([7])] * 2


def test_the_plan_is_of_one_rank() -> None:
    whole, part = (build.plan_launch(config_of(ranks=ranks)) for ranks in (1, 2))
    assert part.whole == whole.spec and part.model == whole.model
    layers = whole.spec.num_parameters - part.spec.num_parameters  # a half of the tensors, except norms
    assert whole.weight_bytes - part.weight_bytes == 4 * layers > whole.weight_bytes // 4
    assert build.profile_key(part) != build.profile_key(whole)
    assert build.profile_key(part).model.endswith(" on 2 ranks")
    assert any("2 ranks divide each layer" in note for note in part.notes)
    options = {"swap_space": 0.01}
    swaps = [build.plan_launch(config_of(ranks=ranks, **options)) for ranks in (1, 2)]
    assert swaps[0].host_units == swaps[1].host_units, "half of the memory for units of half the size"
    assert build.host_bytes(swaps[0]) == build.host_bytes(swaps[1])
    assert [build.scheduler_config(config_of(), each).unit_bytes for each in swaps] == [1536, 768]


def test_models_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="9 attention heads cannot be divided among 2 ranks"):
        build.plan_launch(config_of("llama-gqa3-odd-heads"))
    mixture = shape(
        tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 .* transformers' modules run MixtralForCausalLM"):
        build.plan_launch(config_of(model=str(mixture)))
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at least 1"):
        EngineConfig(tensor_parallel_size=0)


def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.backend.find_backend", lambda _name: CudaBackend())
    monkeypatch.setattr(CudaBackend, "devices", lambda _self: ["3"])
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs as many CUDA devices; 1 can be seen"):
        build.plan_launch(config_of(device="cuda"))


def test_ranks_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "read_processor", lambda: Processor("fast", 8, 16, frozenset()))
    counts = [openmp.num_threads(EngineConfig(tensor_parallel_size=ranks), {}) for ranks in (1, 2, 16)]
    assert counts == [8, 4, 1]


# Devices that take steps ahead ----------------------------------------------------------------------------------------


class FollowersHere:
    """See Leader. The second rank is a thread that gets the messages of a process."""

    pids: ClassVar[list[int]] = []

    def __init__(self, follower: Callable[[], Follower]) -> None:
        self.thread = ThreadPoolExecutor(1)
        self._follower = self.thread.submit(follower)
        self.failures: list[Any] = []

    def begin(self, output: SchedulerOutput, rows: RowTable) -> None:
        step = messages.decode_step(messages.encode(RankStep.of(output, rows)))
        assert not any(new.token_ids for new in step.output.new_requests), "tokens go once, with the chunks"
        self.failures.append(self.thread.submit(lambda: self._follower.result().run(step)))

    def end(self) -> None: ...

    def lost(self) -> None: ...


@pytest.mark.slow
@pytest.mark.timeout(600)  # may have to build the library
@pytest.mark.parametrize(
    ("backend", "case", "vocab"),
    [
        *((backend, "llama-gqa2", 97) for backend in BACKENDS),
        ("torch", "llama-gqa2", 98),
        ("cuda", "llama-gqa2", 98),
        ("torch", "gemma2", 97),
        ("native", "opt", 97),  # a bias behind the sums
        ("native", "neox", 98),  # two branches of the same rows
        ("native", "gemma3", 97),  # a norm behind the sums
    ],
)
def test_two_devices_equal_one(backend: str, case: str, vocab: int) -> None:
    """Of a device that takes steps ahead the second one is told no token that the host does not know."""
    config = SchedulerConfig(
        num_units=68, max_model_len=100, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=24,
        pipeline_depth=int(backend == "cuda"),
    )  # fmt: skip
    folder = tiny_models.model_folder(case)
    whole, store = replace(load_spec(folder), vocab_size=vocab), distributed.HashStore()
    load_format = "auto" if vocab == 97 else "dummy"

    def device_of(rank: int, ranks: int) -> Any:
        group = RankGroup(store, rank, ranks, CPU, nccl=False) if ranks > 1 else None
        shard = None if group is None else Shard(rank, ranks, group.total, group.gather)
        make = linear_of(backend)
        weights = load_weights(whole, folder, dtype="float32", load_format=load_format, shard=shard, make=make)
        device = devices.device_of(backend, whole if shard is None else shard.spec_of(whole), weights, config.limits)
        if group is not None:
            device.join(group.share)
        return device

    prompts = prompts_of(97)
    one = Driver(Runner(device_of(0, 1)), config)
    alone = generate(one, prompts)
    others = FollowersHere(lambda: Follower(device_of(1, 2)))
    with others.thread:
        runner = Runner(device_of(0, 2))
        runner.ranks = others  # type: ignore[assignment]
        driver = Driver(runner, config)
        oracle = Oracle(lambda spec: alone[spec.request_id], seed=1, penalties=backend != "cuda")
        driver.core.state.speculation = oracle
        assert generate(driver, prompts) == alone
        assert driver.stats().accepted_tokens > 10
        assert_vectors_equal(driver, one)
        assert driver.most_in_flight == 1 + config.pipeline_depth
        for step in others.failures:
            step.result()
