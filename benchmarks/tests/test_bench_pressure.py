"""The benchmark of a pool that is too small: what it reads, counts and prints."""

import json
import math
import re
from pathlib import Path

import pytest
from fake_engine import Served, serve

from benchmarks import pressure
from benchmarks.live import PACKAGED, read_metric
from engine.build import build_engine, plan_launch
from engine.config import EngineConfig
from engine.models.spec import load_spec
from engine.text.tokenizer import Tokenizer
from loadgen.records import RequestRecord

PAGE = """# HELP tidemill_preemptions_total Preemptions by cause.
# TYPE tidemill_preemptions_total counter
tidemill_preemptions_total{cause="memory"} 3.0
tidemill_preemptions_total{cause="late"} 2.0
tidemill_prefill_tokens_total 1000.0
tidemill_decode_tokens_total 500.0
tidemill_cache_units_total{operation="swap_out"} 7.0
tidemill_cache_units_total{operation="restore"} 4.0
tidemill_hidden_blocks 5.0
tidemill_prompt_tokens_total{class="online"} 99.0
"""


def test_counters_are_summed_by_cause_and_read_by_operation() -> None:
    expected = {"preemptions": 5.0, "prefill_tokens": 1000.0, "decode_tokens": 500.0, "swap_out": 7.0, "swap_in": 0.0}
    assert pressure.counters(PAGE) == {**expected, "restore": 4.0}
    assert set(pressure.counters("").values()) == {0.0}
    assert [read_metric(PAGE, name, missing=0.0) for name in (pressure.HIDDEN, "tidemill_hidden")] == [5.0, 0.0]


def refused() -> RequestRecord:
    return RequestRecord(0, "online", 2.0, 10, 4, outcome="http_error", status=429)


def answer(ttft: float, gap: float, tokens: int) -> RequestRecord:
    times = [2.0 + ttft + gap * i for i in range(tokens)]
    made = RequestRecord(0, "online", 2.0, 10, 4, first_token_at=times[0], chunk_at=times, chunk_tokens=[1] * tokens)
    made.outcome = "ok" if tokens == 4 else "cut"
    return made


def test_a_line_of_the_table() -> None:
    """Two good answers, one too late, one refused; 3 answers take 3 * (10 + 4 - 1) tokens, 50 were computed."""
    answers = [answer(0.1, 0.01, 4), answer(0.2, 0.01, 4), answer(3.0, 0.01, 4), refused()]
    counts = {
        **pressure.counters(""),
        "prefill_tokens": 38.0,
        "decode_tokens": 12.0,
        "preemptions": 1.0,
        "restore": 6.0,
    }
    run = pressure.PressureRun(10, 4, answers, counts, [1.0, 4.0])
    assert run.recomputed == 50 - 39
    cells = pressure.show("arm", "1", [run, run], ttft=1.0, tbt=0.1).split()
    assert cells == [
        "arm",
        "1",
        "8",
        "2",
        "50.0%",
        "200",
        "3000",
        "10.0",
        "10.0",
        "2",
        "22",
        "0",
        "0",
        "12",
        "2.5",
    ]
    assert len(cells) == len(re.findall(r"(?:TTFT |TBT )?P\d\d(?: ms)?|\S+", pressure.TABLE.heading))
    assert pressure.answered_rate(run) == 3 / (2.0 + 3.0 + 0.03)
    with pytest.raises(SystemExit, match="--rate"):
        pressure.answered_rate(pressure.PressureRun(10, 4, [refused()], counts))


def test_the_models_have_one_size_and_differ_in_how_hidden_state_is_run(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "opt").mkdir()
    assert pressure.model_folder(tmp_path / "demo", "demo") == ("--load-format=safetensors",)
    assert pressure.model_folder(tmp_path / "opt", "opt") == ("--load-format=dummy",)
    demo, opt = load_spec(tmp_path / "demo"), load_spec(tmp_path / "opt")
    assert demo == load_spec(PACKAGED)
    assert (demo.rope is None, opt.rope is None) == (False, True)
    assert demo.hidden_ratio == opt.hidden_ratio == 0.5
    assert demo.kv_bytes_per_token(2) == opt.kv_bytes_per_token(2)
    matrices = [
        spec.num_parameters - (spec.max_position_embeddings * 256 if spec is opt else 0) for spec in (demo, opt)
    ]
    assert math.isclose(*matrices, rel_tol=0.01)


def test_pools_of_8_bits_have_the_same_bytes(tmp_path: Path) -> None:
    assert pressure.model_folder(tmp_path, "gqa") == ("--load-format=dummy",)
    spec = load_spec(tmp_path)
    assert (spec.num_kv_heads, spec.hidden_ratio) == (2, 1.0)
    assert pressure.blocks_of(tmp_path, 128, ()) == 128 and pressure.blocks_of(tmp_path, 128, (pressure.INT8,)) == 248


def test_admitted_are_those_before_the_first_preemption() -> None:
    assert pressure.most_before([0, 4, 9, 12, 6], [3, 3, 3, 4, 5]) == 9
    assert pressure.most_before([2, 5], [0, 0]) == 5 and pressure.most_before([], []) == 0


def test_every_arm_is_known_to_the_server() -> None:
    from gateway.cli import _parser

    parser = _parser()
    for flags in pressure.ARMS.values():
        parser.parse_args(["serve", *flags])


async def test_a_seed_against_a_server_whose_pool_is_too_small(tmp_path: Path) -> None:
    """Everybody is answered in full, and what was preempted is counted."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=6,
        max_model_len=64,
        profile_seconds=0.0,
        slo="ttft_p99=100s,tbt_p99=10s",
        enable_prefix_caching=False,
    )
    plan = plan_launch(config)
    engine = build_engine(config, plan)
    served: Served
    async with serve(engine, Tokenizer.load(plan.folder, probe=False), None, served_model_name=("model",)) as served:
        run = await pressure.run_seed(served.url, [0.0] * 12, 1, 20, 40)  # some run at once on a fast machine, too
    assert len(run.answers) == 12
    assert all(answer.ok and sum(answer.chunk_tokens) == 40 and (answer.ttft or 0.0) > 0.0 for answer in run.answers)
    assert run.counts["preemptions"] > 0 and run.recomputed > 0
    assert run.counts["swap_out"] == run.counts["restore"] == 0 and run.hidden_blocks


def test_the_costs_of_a_profile(tmp_path: Path) -> None:
    costs = {"run_hidden": 2e-6, "restore": None, "swap_out": 1e-4, "swap_in": 5e-5}
    costs |= {"run_hidden_step": 3e-4, "restore_step": None}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"cache_costs": costs, "held_out_mape": 0.12}))
    line = pressure.costs(path)
    assert (
        line.startswith("measured: 2.00 µs")
        and "300.00 for the first" in line
        and "- and - restored" in line
        and line.endswith("12.0% off")
    )
