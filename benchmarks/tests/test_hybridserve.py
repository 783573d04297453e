"""The experiment `hybridserve`: pipelines by hand, what lies where, orderings, the split against a grid, bad input."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.experiments import hybridserve as hybrid
from benchmarks.experiments import hybridserve_table as table
from benchmarks.experiments import main
from benchmarks.experiments.hybridserve import ARMS, CONFIG, LINK, Config, Load, Point, choose, make_case, run_point
from benchmarks.experiments.offload import algorithm_1, split_context
from benchmarks.experiments.pipelines import Compact, OffloadDevice, Stage, lay_out, run_layers
from benchmarks.experiments.table import Result
from engine.cache.placement import HostSplit, OffloadCosts
from loadgen.simulation.gpu import DEVICES, MODELS, SimulatedDevice
from loadgen.simulation.run import Metrics

ARM = {arm.name: arm for arm in ARMS}
TINY = replace(CONFIG, loads=(Load("opt-13b", 16, 256), Load("opt-30b", 8, None)), output=18)


def run(name: str, load: Load, seed: int = 0, config: Config = CONFIG) -> Metrics:
    return run_point(Point(config, load, ARM[name], seed))


def step_seconds(name: str, load: Load, seed: int = 0) -> float:
    """A decode step in the middle of the run, without noise."""
    point = Point(CONFIG, load, ARM[name], seed)
    case, split, costs = choose(point, make_case(point))
    return case.step(split, costs, case.output // 2).timeline.seconds


def moved(metrics: Metrics) -> float:
    return metrics["weight_bytes"] + metrics["kv_bytes"] + metrics["act_bytes"]


def test_pipelines_by_hand() -> None:
    # The link is slower: loads end at 2, 4, 6 and the last compute a second later.
    assert run_layers([Stage(2.0, 1.0)] * 3, 1, 0.0).seconds == 7.0
    # The device is slower: computes end at 4, 7, 10; the third load had to wait for the first buffer until 4.
    assert run_layers([Stage(1.0, 3.0)] * 3, 1, 0.0).seconds == 10.0
    # A long load waits for its buffer: computes 1-11, 11-12; the third load goes from 11 to 16.
    assert run_layers([Stage(1.0, 10.0), Stage(0.0, 1.0), Stage(5.0, 1.0)], 1, 0.0).seconds == 17.0
    # Two layers; the second's weights are there at 5, the next step's first at 10.
    assert run_layers([Stage(0.0, 1.0)], 2, 5.0) == (10.0, 10.0, 2.0)
    # The third layer's weights wait until the first has ended (at 4): they come 4-5, the next step's 8-9.
    assert run_layers([Stage(0.0, 4.0)], 3, 1.0).seconds == 12.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.floats(0.0, 9.0),
)
def test_pipelines_overlap_but_never_more_than_fully(
    pairs: list[tuple[float, float]], layers: int, weights: float
) -> None:
    found = run_layers([Stage(*pair) for pair in pairs], layers, weights)
    assert max(found.link_busy, found.device_busy) <= found.seconds + 1e-9
    assert found.seconds <= found.link_busy + found.device_busy + 1e-9
    assert found.link_busy == pytest.approx(layers * (weights + sum(load for load, _ in pairs)))


@pytest.mark.parametrize("model", hybrid.OPT)
@pytest.mark.parametrize("compact", ["none", "project", "tokens"])
def test_the_device_is_full_and_no_fuller(model: str, compact: Compact) -> None:
    device = OffloadDevice(SimulatedDevice.named(model, "rtx-4090"))
    layout = lay_out(device, compact, prefill_tokens=8192)
    buffers = {"none": 2, "project": 4, "tokens": 3}[compact] * 512 * 2**20
    weights = device.layers * device.layer_bytes
    held = layout.resident * weights + layout.cache_bytes + buffers
    held += 2 * device.layer_bytes * (1.0 - layout.resident)
    shape = MODELS[model]
    held += shape.vocab_size * shape.hidden_size * 2 + 8192 * (4 * shape.hidden_size + shape.ffn_size) * 2
    assert held == pytest.approx(0.9 * 24 * 2**30, rel=1e-6)
    assert (layout.resident == 1.0) == (model == "opt-6.7b") and (layout.cache_bytes > 0.0) == (model == "opt-6.7b")
    assert layout.max_blocks == 512 * 2**20 // (16 * 4 * shape.hidden_size)


@pytest.mark.parametrize("load", [Load("opt-30b", 128, 512), Load("opt-6.7b", 128, 1024), Load("opt-66b", 64, None)])
def test_what_is_moved_is_what_lies_on_the_host(load: Load) -> None:
    plain, compact, both = (run(name, load) for name in ("flexgen-kv", "act-only", "hybrid"))
    shape, steps = MODELS[load.model], CONFIG.output - 1
    case = make_case(Point(CONFIG, load, ARM["flexgen-kv"], 0))
    context = sum(prompt + step for prompt in case.prompts for step in range(1, steps + 1))
    needed = context * shape.kv_bytes_per_token - steps * case.layout.cache_bytes
    # Blocks round up, by half a block on average; what is on the device rounds down.
    rounding = steps * load.batch * 16 * shape.kv_bytes_per_token
    assert needed - 0.01 * rounding <= plain["kv_bytes"] <= needed + 2 * rounding
    assert plain["act_bytes"] == compact["kv_bytes"] == 0.0
    if case.layout.cache_bytes == 0.0:
        assert 2 * compact["act_bytes"] == plain["kv_bytes"] == both["kv_bytes"] + 2 * both["act_bytes"]
        assert both["act_share"] == pytest.approx(2 * both["act_bytes"] / plain["kv_bytes"])
    for metrics in (plain, compact, both):
        # Everything that is counted went over the link at its rate; noise stretches busy and whole time alike.
        seconds = metrics["link_busy"] * metrics["decode_seconds"]
        assert seconds * LINK == pytest.approx(moved(metrics), rel=0.02)
        streamed = (1.0 - metrics["resident"]) * (shape.weight_bytes - shape.vocab_size * shape.hidden_size * 2)
        assert metrics["weight_bytes"] == pytest.approx(steps * streamed)


@pytest.mark.parametrize("load", [load for load in CONFIG.loads if load.prompt in (128, 512, 1920, None)])
def test_the_hybrid_is_at_least_as_good_as_either(load: Load) -> None:
    seconds = {name: step_seconds(name, load) for name in ARM}
    assert seconds["hybrid"] <= 1.001 * min(seconds["flexgen-kv"], seconds["act-only"])
    assert seconds["hybrid"] <= 1.02 * min(seconds["hybrid-half"], seconds["algorithm-1"])
    if load.batch == 128:  # where the weights are nearly all that is loaded, tokens cost nothing either
        assert seconds["token-recompute"] > seconds["hybrid"]
    if load.link == LINK and load.batch == 128:
        assert seconds["token-recompute"] > 1.5 * seconds["flexgen-kv"]


def test_the_closed_form_is_near_the_best_of_a_grid() -> None:
    generator, ratios, papers = random.Random(3), [], []
    for seed in range(20):
        prompt = generator.choice((None, generator.randint(64, 1900)))
        load = Load(
            generator.choice(hybrid.OPT), generator.choice((4, 16, 64, 128)), prompt, generator.uniform(8e9, 5e10)
        )
        found = {name: step_seconds(name, load, seed) for name in ("hybrid", "hybrid-best", "algorithm-1")}
        ratios.append(found["hybrid-best"] / found["hybrid"])
        papers.append(found["hybrid-best"] / found["algorithm-1"])
    print(f"20 loads: closed form {sum(ratios) / 20:.4f} of the grid's best, worst {min(ratios):.4f}")
    assert min(ratios) > 0.94 and sum(ratios) / len(ratios) > 0.98
    assert sum(papers) / len(papers) < sum(ratios) / len(ratios) - 0.05


def test_both_pipelines_are_busy_under_the_split() -> None:
    found = run("hybrid", Load("opt-30b", 128, 1024))
    assert found["device_busy"] > 0.9 and found["link_busy"] > 0.9
    plain = run("flexgen-kv", Load("opt-30b", 128, 1024))
    assert plain["device_busy"] < 0.15 and plain["link_busy"] > 0.98


def test_more_context_and_slower_links_shift_the_split() -> None:
    shares = [run("hybrid", Load("opt-66b", 128, prompt))["act_share"] for prompt in (128, 512, 1920)]
    # Weights keep the link busy: little context can all be ACT (Figure 13: more reuse, more ACT).
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    assert run("hybrid", Load("opt-66b", 128, 1920, LINK / 2))["act_share"] > shares[-1] + 0.1


COSTS = OffloadCosts(load_weights=0.01, load_kv=2e-5, regenerate=3e-5, forward_fixed=1e-3, forward=3e-7, ratio=0.5)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 2_000))
def test_a_split_for_a_context_holds_it_in_balance(blocks: int, act_device: int) -> None:
    split = split_context(COSTS, blocks, act_device)
    assert abs(split.kv + split.act - blocks) <= 2
    link, device = COSTS.link_seconds(*split), COSTS.device_seconds(*split, act_device)
    if split.kv > 2 and split.act > 2:
        assert link == pytest.approx(device, abs=4 * (COSTS.load_kv + COSTS.regenerate))
    else:
        assert (device >= link - 1e-4) if split.act <= 2 < split.kv else (blocks <= 3 or link >= device - 1e-4)


def test_algorithm_1_by_hand() -> None:
    # Budget 0.01 s: 333.3 ACT blocks; 833.3 KV blocks of room are left for a = 833.3 / (0.5 + 1.5) = 416.7 more.
    assert algorithm_1(COSTS, 1000, 0) == HostSplit(625, 750)
    # 1,000 ACT blocks on the device take 0.02 s more than the weights: 1,000 KV blocks, and nothing is left.
    assert algorithm_1(COSTS, 1000, 1000) == HostSplit(1000, 0)


def test_runs_are_deterministic_and_seeds_differ() -> None:
    load = Load("opt-30b", 8, None)
    assert run("hybrid", load, config=TINY) == run("hybrid", load, config=TINY)
    assert run("hybrid", load, config=TINY) != run("hybrid", load, seed=1, config=TINY)
    fixed = Load("opt-30b", 8, 128)
    first, second = (run("flexgen-kv", fixed, seed=seed, config=TINY) for seed in (0, 1))
    assert first["kv_bytes"] == second["kv_bytes"] and first["output_tokens_per_s"] != second["output_tokens_per_s"]


@pytest.mark.parametrize(
    ("load", "changes", "message"),
    [
        (Load("llama-3-8b", 4, 128), {}, "no less room than its K and V"),
        (Load("opt-30b", 0, 128), {}, "at least one request"),
        (Load("opt-30b", 4, 128, 0.0), {}, "at least one request"),
        (Load("opt-30b", 4, 0), {}, "between 1 and 2048"),
        (Load("opt-30b", 4, 1921), {}, "between 1 and 2048"),
        (Load("opt-30b", 4, 128), {"output": 1}, "between 1 and 2048"),
        (Load("opt-66b", 256, 1920), {}, "do not fit the host"),
        (Load("opt-66b", 4, 128), {"prefill_tokens": 200_000}, "no room for two layers"),
    ],
)
@pytest.mark.parametrize("name", ["flexgen-kv", "hybrid"])
def test_what_cannot_run_is_refused(name: str, load: Load, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(name, load, config=replace(CONFIG, **changes))  # type: ignore[arg-type]


def test_unknown_names_are_refused() -> None:
    for load, config in ((Load("opt-1t", 4, 128), CONFIG), (Load("opt-30b", 4, 128), replace(CONFIG, device="abacus"))):
        with pytest.raises(KeyError):
            run("hybrid", load, config=config)


def test_the_experiment_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(main.EXPERIMENTS, "hybridserve", main.EXPERIMENTS["hybridserve"]._replace(config=TINY))
    assert main.main(["hybridserve", "--seeds", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert len(rows) == 2 * len(TINY.loads) * len(ARMS) and {row["seed"] for row in rows} == {0, 1}
    assert set(rows[0]) == {"experiment", "policy", "setting", "seed", "metrics"}
    assert rows[0]["setting"] == {
        "model": "opt-13b", "device": "rtx-4090", "batch": 16, "output": 18, "prompt": 256, "link": LINK,
    }  # fmt: skip
    assert all(row["metrics"]["output_tokens_per_s"] > 0.0 for row in rows)
    assert (tmp_path / "opt-13b-throughput.svg").read_text().count("<circle") >= len(table.DRAWN)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["model", "batch", "prompt"] and lines[-1].split()[-5:-3] == ["1.61", "2.19"]
    assert main.main(["hybridserve", "--window", "5"]) == 2


def test_factors_are_over_k_and_v_alone() -> None:
    def result(policy: str, seed: int, rate: float) -> Result:
        setting = {"model": "m", "batch": 4, "prompt": 128, "link": LINK}
        return Result("hybridserve", policy, setting, seed, {"output_tokens_per_s": rate})

    results = [result("flexgen-kv", 0, 1.0), result("hybrid", 0, 3.0), result("flexgen-kv", 1, 3.0)]
    assert table.factors(results, table.key_of(results[0])) == {"flexgen-kv": 1.0, "hybrid": 1.5}
    assert table.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="no values"):
        table.geometric_mean([])


def test_the_model_is_the_devices() -> None:
    device = OffloadDevice(SimulatedDevice.named("opt-30b", "rtx-4090"))
    shape, spec = MODELS["opt-30b"], DEVICES["rtx-4090"]
    assert device.layer_bytes == 12 * 7168**2 * 2 and device.ratio == 0.5
    assert device.block_bytes == 16 * 4 * 7168 and device.load_seconds(25e9) == 1.0
    flops = 4 * shape.hidden_size**2 * 4096
    assert device.regenerate_seconds(4096) >= flops / (spec.flops * spec.flops_efficiency)
    # Token recomputation is the whole layer, six times the projections (Figure 5).
    assert 5.5 < device.recompute_seconds(4096, 0) / device.regenerate_seconds(4096) < 7.0
    assert device.recompute_seconds(4096, 4096**2) > device.recompute_seconds(4096, 0)
