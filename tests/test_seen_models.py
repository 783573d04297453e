"""Models whose layers all have a window, on runners whose free units hold nothing but NaN: released blocks are
never read, and answers are those of transformers' `generate`."""

from typing import Any

import pytest
import tiny_models
import torch
from driver import Driver, small_config
from test_families import OUTPUT, decoder_of, prompts_of, reference

from engine.build import READ_TOGETHER, build_runner, plan_launch, scheduler_config
from engine.config import EngineConfig
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.library import is_built
from engine.execution.runner import Runner
from engine.limits import SchedulerConfig
from engine.scheduling.output import Collect, SchedulerOutput

CASE, WINDOW, BLOCK = "mistral-window", 17, 4


class Poisoned:
    """A runner that fills all free units with NaN before each step."""

    def __init__(self, runner: Runner[Any]) -> None:
        self.runner, self.driver = runner, None

    def launch(self, output: SchedulerOutput) -> Collect:
        pool = self.driver.core.state.pool  # type: ignore[attr-defined]
        units = self.runner.device.pool.units
        if units.dtype == torch.int8:
            units.view(torch.int16)[pool._free] = 0x7FC0  # as a scale, NaN
        else:
            units[pool._free] = float("nan")
        return self.runner.launch(output)


def poisoned(runner: Runner[Any], config: SchedulerConfig) -> Driver:
    between = Poisoned(runner)
    between.driver = driver = Driver(between, config)  # type: ignore[assignment, arg-type]
    return driver


def run_all(driver: Driver, prompts: list[list[int]], output: int) -> None:
    outputs = driver.run_all(prompts, output)
    for index, (prompt, got) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, gaps = reference(CASE, tuple(prompt), output)
        assert len(got) == output
        different = next((at for at in range(output) if got[at] != tokens[at]), None)
        assert different is None or gaps[different] < 1e-4, f"prompt {index}, token {different}"
    stats = driver.stats()
    assert stats.units_owned == 0 and stats.units_free + stats.units_cached == stats.units_total


@pytest.mark.parametrize(("depth", "host_units", "caching"), [(0, 0, True), (1, 0, False), (1, 60, True)])
def test_tokens_are_those_of_transformers_with_preemptions_and_chunks(
    depth: int, host_units: int, caching: bool
) -> None:
    options = {"enable_prefix_caching": caching, "pipeline_depth": depth, "host_units": host_units}
    config = small_config(28, window=WINDOW, **options)
    driver = poisoned(Runner(TorchDevice(decoder_of(CASE), config.limits, host_units=host_units)), config)
    run_all(driver, prompts_of(CASE), OUTPUT)
    stats = driver.stats()
    assert sum(stats.preemptions.values()) > 0 and (stats.prefix_hit_tokens > 0) == caching


@pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("auto", marks=pytest.mark.skipif(not is_built(), reason="no native kernels here"))],
)
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_a_request_longer_than_the_cache_is_served(kernels: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.plan.BLOCK_SIZE", BLOCK)
    folder = tiny_models.model_folder(CASE)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kernels=kernels, kv_cache_dtype=cache, threads=1,
        num_gpu_blocks_override=30, max_num_batched_tokens=16, max_num_seqs=4, profile_seconds=0.0, self_test=False,
    )  # fmt: skip
    plan = plan_launch(config)
    assert plan.limits.window == WINDOW + READ_TOGETHER
    assert plan.limits.max_model_len == 256 > 30 * BLOCK == plan.limits.held.max_model_len
    runner, plan = build_runner(config, plan)
    scheduler = scheduler_config(config, plan)
    driver = poisoned(runner, scheduler)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, plan.spec.vocab_size, (length,), generator=generator).tolist() for length in (180, 200)]
    if cache == "auto":
        run_all(driver, prompts, 30)
        return
    assert [len(output) for output in driver.run_all(prompts, 30)] == [30, 30], "NaN was read"


def test_a_cache_too_small_for_a_window_and_its_chunks_limits_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.plan.BLOCK_SIZE", BLOCK)
    folder = tiny_models.model_folder(CASE)
    config = EngineConfig(model=str(folder), device="cpu", num_gpu_blocks_override=20)
    assert plan_launch(config).limits.max_model_len == 80


@pytest.mark.parametrize("case", ["gemma3", "qwen2-window", "qwen3"])
def test_where_a_layer_sees_everything_nothing_is_given_back(case: str) -> None:
    plan = plan_launch(
        EngineConfig(model=str(tiny_models.model_folder(case)), device="cpu", num_gpu_blocks_override=99)
    )
    assert plan.limits.window == 0


@pytest.mark.parametrize("way", [{"overload": "drop"}, {"model_impl": "transformers"}])
def test_what_counts_on_all_blocks_keeps_them(way: dict[str, Any]) -> None:
    config = EngineConfig(model=str(tiny_models.model_folder(CASE)), device="cpu", num_gpu_blocks_override=99, **way)
    assert plan_launch(config).limits.window == 0
