"""The experiment `apt-serve` end to end on tiny loads, and its parts by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.experiments import apt, apt_point, apt_table, main
from benchmarks.experiments.machine import Machine, build_machine
from benchmarks.experiments.table import Result
from engine.api import EngineRequest, SamplingParams
from engine.virtual import Arrival, VirtualRecord, VirtualRun
from loadgen.simulation.gpu import MODELS, SimulatedDevice
from predictor.features import BatchFeatures

CHAT = apt_point.Load("apt-chat", 1.0, 1.0, (1.0,), (1.0,))
TINY = apt.Config(
    parts=(
        apt.Part(apt.OPT, (CHAT,), tuple(arm for arm in apt.ARMS if arm.name in {"fcfs", "apt-hybrid", "goodput-kv"})),
        apt.Part(apt.LLAMA, (replace(CHAT, bursts=()),), apt.HOST_ARMS[-1:]),
    ),
    requests=20,
    cvs=(5.0,),
)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(apt.OPT)


def say(_text: str) -> None:
    pass


def record(at: float, times: list[float], *, ended: bool = True) -> VirtualRecord:
    request = EngineRequest("n", (1,), SamplingParams(max_tokens=9))
    return VirtualRecord(Arrival(at, request), times, times[-1] if ended and times else None)


def result(policy: str, rate: float, good: int, seed: int = 0, cv: float = 1.0) -> Result:
    setting = {"model": "m", "workload": "w", "rate": rate, "cv": cv}
    return Result("apt-serve", policy, setting, seed, {"good": float(good), "requests": 100.0})


def test_attainment_is_counted_as_by_the_load_generator() -> None:
    run = VirtualRun(
        online=[
            record(0.0, [0.5, 1.0, 1.5]),
            record(1.0, [2.5, 3.0]),  # the first token is late
            record(2.0, [2.5, 4.5]),  # a gap is too long
            record(3.0, [3.5], ended=False),
            record(4.0, []),
        ],
        end=10.0,
    )
    found = apt_point.attained(run, apt_point.Load("w", 1.0, 1.0, ()))
    assert found["good"] == 1.0 and found["slo_attainment"] == 0.2
    assert found["ttft_attainment"] == 0.6 and found["tbt_attainment"] == 0.8
    assert found["ttft_p99"] == 6.0, "who never got a token has waited until the end"


def test_one_long_gap_in_a_hundred_is_within_its_p99() -> None:
    times = [0.5 + 0.01 * i + (5.0 if i > 50 else 0.0) for i in range(101)]
    found = apt_point.attained(VirtualRun(online=[record(0.0, times)], end=9.0), apt_point.Load("w", 1.0, 1.0, ()))
    assert found["good"] == 1.0 and found["tbt_p99"] < 1.0


def test_rates_at_an_attainment_are_read_off_the_curve() -> None:
    curve = [(1.0, 1.0), (2.0, 0.8), (4.0, 0.4)]
    assert apt_table.effective_rate(curve, 0.9) == pytest.approx(1.5)
    assert apt_table.effective_rate(curve, 0.6) == pytest.approx(3.0)
    assert apt_table.effective_rate(curve, 0.3) == 4.0
    assert apt_table.effective_rate([(1.0, 0.5)], 0.9) is None


def test_seeds_are_pooled() -> None:
    results = [result("p", 1.0, 90), result("p", 1.0, 70, seed=1), result("p", 2.0, 50), result("p", 2.0, 10, cv=5.0)]
    share, low, high = apt_table.pooled_attainment(results[:2])
    assert share == 0.8 and low < 0.8 < high
    assert apt_table.curve(results, "p", "m", "w") == [(1.0, 0.8), (2.0, 0.5)]


def test_hidden_state_is_offered_where_it_is_small(machine: Machine) -> None:
    kv, hidden, host = (apt_point.with_cache(machine, cache).config for cache in ("kv", "hidden", "host"))
    assert kv.scratch_blocks == kv.host_units == host.scratch_blocks == hidden.host_units == 0
    assert 0.95 * kv.num_units < hidden.num_units < kv.num_units, "the scratch area comes out of the pool"
    scratch = 2 * hidden.scratch_blocks / MODELS["opt-13b"].num_layers
    assert hidden.num_units + scratch <= kv.num_units
    assert host.host_units * host.unit_bytes <= apt_point.HOST_BYTES and host.unit_bytes == 8 * 819_200
    # A projected token takes 2 · 5,120 · 10,240 FLOPs in each of 40 layers, at the rate of a large product.
    model = apt_point.with_cache(machine, "hidden").predictor
    assert model.restored == pytest.approx(40 * 2 * 5120 * 10240 / (312e12 * 0.655), rel=0.15)
    assert model.compact == pytest.approx(model.restored, rel=0.15)
    assert hidden.rho == pytest.approx(model.compact + model.compact_step / hidden.compact_tokens)
    step = BatchFeatures()
    for tokens in (128, 500, 1000, 2000):
        taken = machine.device.cache_work_seconds(tokens)
        assert model.cache_work(compact_tokens=tokens, beside=step) == pytest.approx(taken, rel=0.15)
    with pytest.raises(ValueError, match="llama-3-8b"):
        apt_point.with_cache(build_machine(apt.LLAMA), "hidden")


def test_every_arm_gets_the_same_requests_at_the_same_times() -> None:
    points = apt.points(TINY, None, 3)
    cases = {(p.load, p.cv) for p in points}
    by_case = {case: {p.rows for p in points if (p.load, p.cv) == case} for case in cases}
    assert len(points) == 3 + 3 + 1 and all(len(rows) == 1 for rows in by_case.values())
    assert all(len(point.rows) == TINY.requests for point in points)


def test_the_experiment_on_a_tiny_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(main.EXPERIMENTS, "apt-serve", main.EXPERIMENTS["apt-serve"]._replace(config=TINY))
        assert main.main(["apt-serve", "--workers", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert len(rows) == 7 and {row["experiment"] for row in rows} == {"apt-serve"}
    for row in rows:
        metrics = row["metrics"]
        assert metrics["requests"] == 20.0 and metrics["good"] == 20.0 * metrics["slo_attainment"]
        assert metrics["recomputed"] >= 0.0 and all(math.isfinite(value) for value in metrics.values())
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "opt-13b-apt-chat-rate.svg",
        "opt-13b-apt-chat-cv-1.svg",
        "llama-3-8b-apt-chat-rate.svg",
    }
    assert "apt-hybrid" in capsys.readouterr().out


def test_a_run_is_deterministic_and_uses_what_its_arm_offers(machine: Machine) -> None:
    load = apt_point.Load("apt-chat", 1.0, 1.0, (3.0,))
    rows = apt_point.requests_of(load, 3.0, 1.0, 40, 0, None, 2048)
    found = {}
    for arm in apt.ARMS:
        if arm.name in {"fcfs", "goodput-kv", "apt-hybrid"}:
            offered = apt_point.with_cache(machine, arm.cache)
            if arm.cache == "hidden":  # at its true cost it is hardly ever worth it here
                offered = replace(offered, config=replace(offered.config, rho=0.0))
            point = apt_point.Point(offered, load, 3.0, 1.0, arm, rows, 0)
            found[arm.name] = apt_point.run_point(point)
            assert apt_point.run_point(point) == found[arm.name]
    assert found["goodput-kv"]["cache_work"] == 0.0 < found["apt-hybrid"]["cache_work"]
    assert found["goodput-kv"]["good"] > found["fcfs"]["good"], "three times what the machine can serve"


def test_a_cache_of_8_bits_has_nearly_twice_the_units_and_half_the_bytes_to_read() -> None:
    plain = build_machine(replace(apt.LLAMA, device="rtx-4090"))
    kv, int8 = (apt_point.with_cache(plain, cache) for cache in ("kv", "int8"))
    assert int8.config.num_units == pytest.approx(kv.config.num_units * 256 / 130, rel=1e-3)
    assert int8.config.unit_bytes * 256 == pytest.approx(kv.config.unit_bytes * 130)
    step = (1, 1, 1, 8192, 0)
    read = kv.device.step_seconds(*step) - kv.device.step_seconds(1, 1, 1, 0, 0)
    narrow = int8.device.step_seconds(*step) - int8.device.step_seconds(1, 1, 1, 0, 0)
    assert narrow == pytest.approx(read * 130 / 256)
    assert int8.predictor.decode_context == pytest.approx(kv.predictor.decode_context * 130 / 256, rel=0.1)


@pytest.mark.parametrize(
    ("model", "device", "share"),
    [
        ("opt-13b", "a100-40gb", 0.55),
        ("llama-2-7b", "a100-40gb", 0.49),
        ("llama-2-7b", "h100", 0.40),
        ("llama-2-7b", "rtx-4090", 0.69),
    ],
)
def test_hidden_state_written_through_pays_where_so_many_blocks_are_preempted(
    model: str, device: str, share: float
) -> None:
    """A unit out for every block that is computed, and a unit in and a projection for each that comes back, against two
    units out and two in for those alone: the figures of the guide."""
    simulated = SimulatedDevice.named(model, device)
    unit = simulated.transfer_seconds(16 * simulated.model.kv_bytes_per_token // 2)
    restore = 16 * (simulated.cache_costs().restore or 0.0)
    assert unit / (3 * unit - restore) == pytest.approx(share, abs=0.005)
