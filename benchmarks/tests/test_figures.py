"""The arithmetic of the live benchmarks by hand."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import drawing, features, live, pressure, speculation
from benchmarks.colocation import interference
from benchmarks.colocation_peers import verdict
from benchmarks.colocation_plot import draw
from benchmarks.drawing import Mark, Series
from benchmarks.feature_loads import all_of, conversations, random_bodies
from benchmarks.loads import Run, check_job, delivered, output_of, paired_bound
from loadgen.records import JobRecord, Records, RequestRecord


def record(at: float, *chunks: float, service_class: str = "online", outcome: str = "ok") -> RequestRecord:
    """Return a request that is scheduled at `at` and gets a token at each of `chunks`."""
    made = RequestRecord(0, service_class, at, 256, len(chunks), outcome=outcome)  # type: ignore[arg-type]
    made.chunk_at, made.chunk_tokens, made.output_tokens = list(chunks), [1] * len(chunks), len(chunks)
    made.first_token_at, made.ended_at = chunks[0] if chunks else None, chunks[-1] if chunks else None
    return made


def test_offline_tokens_are_stamped_and_a_prompt_comes_with_its_first_token() -> None:
    records = Records([record(0.0, 6.0, 6.5, 11.0, service_class="offline"), record(1.0, 1.5)])
    assert [item for item in delivered(records) if item[1]] == [(6.0, 257.0), (6.5, 1.0), (11.0, 1.0)]
    assert [item for item in output_of(records) if item[1]] == [(6.0, 1.0), (6.5, 1.0), (11.0, 1.0)]
    assert Run([], delivered(records), 10.0).offline_rate == 258 / 5.0, "from the warm-up to the end"


def test_attainment_is_paired_by_request() -> None:
    fast, late, warm = record(6.0, 6.1, 6.2), record(6.0, 9.0, 9.1), record(1.0, 9.0, 9.1)
    alone, beside = Run([warm, fast, fast], [], 10.0), Run([warm, fast, late], [], 10.0)
    change, lower = paired_bound([beside], [alone], 1.0, 0.2)
    assert change == -0.5 and lower < change


def test_interference_is_paired_by_request() -> None:
    alone = Run([record(6.0, 6.5, 7.0, 7.5), record(8.0, 8.25, 8.5, 8.75)], [], 20.0)
    ours = Run([record(6.0, 6.75, 7.25, 7.75), record(8.0, 8.25, 9.0, 9.75)], [], 20.0, beside=3.0)
    first, second, third = interference("ours", [ours], [alone])
    assert first.startswith("ours, 2 pairs: mean TTFT +33.3%") and first.endswith("P99 +50.0%")
    assert "mean TBT +66.7%" in second and second.endswith("P99 +50.0%")
    assert third.startswith("ours: 3.0 of 20 s")


def test_arms_are_relative_to_the_chats_alone_and_to_the_best_peer() -> None:
    def arm(kept: int, output: float) -> dict[str, list[float]]:
        return {"online": [100], "kept": [kept], "offline_output_tokens": [output]}

    found = {"tidemill, no batch": arm(90, 0.0), "tidemill, batch": arm(89, 30.0), "vLLM": arm(96, 20.0)}
    lines = list(verdict(found, "long"))
    assert lines[0] == "long: tidemill, batch: 89 chats kept, 90 alone"
    assert lines[-1].endswith("89.0% kept, 1.50 times its output") and len(lines) == 3
    inside = {"tidemill-vllm in vLLM, no batch": arm(50, 0.0), "tidemill-vllm in vLLM": arm(49, 10.0)}
    assert next(verdict(inside, "long")) == "long: tidemill-vllm in vLLM: 49 chats kept, 50 alone"


def test_a_job_must_outlast_its_arm_and_lose_nothing() -> None:
    whole = JobRecord(0, 10, status="cancelled", output_lines=6, error_lines=1, unexecuted=3)
    check_job(whole)
    for wrong in ({"status": "completed"}, {"output_lines": 5}, {"duplicated": 1}, {"error": "500"}):
        with pytest.raises(SystemExit, match="job"):
            check_job(replace(whole, **wrong))  # type: ignore[arg-type]


def test_growth_between_two_looks_is_even() -> None:
    watch = live.Watch(("tokens",), 2.0, {"tokens": [(0.5, 10.0), (2.5, 18.0), (3.0, 18.0)]})
    assert watch.grown("tokens") == [(1.0, 2.0), (1.5, 2.0), (2.0, 2.0), (2.5, 2.0), (3.0, 0.0)]


def test_the_plot_has_limits_above_and_output_tokens_below() -> None:
    chats = [record(at, at + 0.5, at + 0.6, at + 1.0) for at in (1.0, 5.0)]
    name = "{http://www.w3.org/2000/svg}"
    above, _ = ElementTree.fromstring(draw(Run(chats, [], 12.0, [(0.5, 90.0)]), 1.0, 0.2)).findall(f"{name}svg")
    (limit,) = above.findall(f"{name}line[@class='mark']")
    first, gaps = (group.findall(f"{name}circle") for group in above.findall(f"{name}g"))
    assert all(float(dot.get("cy", "")) > float(limit.get("y1", "")) for dot in first), "0.5 s of 1 s"
    assert all(float(dot.get("cy", "")) < float(limit.get("y1", "")) for dot in gaps), "a P99 gap of 0.4 s of 0.2 s"


def test_charts_survive_any_data() -> None:
    for series in ([Series("none", [], [])], [Series("one", [1.0], [2.0])], [Series("nan", [1, 2], [math.nan, 3])]):
        for log in (False, True):
            text = drawing.chart("A <title>", series, x="s", y="n", marks=[Mark(1.5, "SLO")], log_x=log)
            assert ElementTree.fromstring(text).tag.rpartition("}")[2] in ("svg", "p")
    assert drawing.log_ticks(10.0, 500.0) == pytest.approx([10, 20, 50, 100, 200, 500])


def test_a_line_of_pressure() -> None:
    """Two good answers, one late, one refused; 3 answers take 3 · (10 + 4 - 1) tokens, 50 were computed."""

    def answer(ttft: float) -> RequestRecord:
        return record(2.0, *(2.0 + ttft + 0.01 * i for i in range(4)))

    answers = [answer(0.1), answer(0.2), answer(3.0), record(2.0, outcome="http_error")]
    counts = pressure.counters("") | {"prefill_tokens": 38.0, "decode_tokens": 12.0, "preemptions": 1.0}
    run = pressure.PressureRun(10, 4, answers, counts, [1.0, 4.0])
    assert run.recomputed == 50 - 39
    cells = pressure.show("arm", [run, run], ttft=1.0, tbt=0.1).split()
    assert cells[:5] == ["arm", "8", "2", "50.0%", "21.5%"] and cells[10:12] == ["2", "22"] and cells[-1] == "2.5"


def test_ratios_of_speculation_are_paired_by_round() -> None:
    spell = speculation.Spell
    off = speculation.Run(
        spell(10.0, 1000, 1000, ["a"]), spell(5.0, 100, 100, ["b"]), spell(20.0, 4000, 100, ["c", "d"]), 0.9, 50.0
    )
    on = replace(
        off, grounded=spell(5.0, 1000, 250, ["a"]), job=spell(16.0, 4000, 50, ["c", "x"]), kept=0.95, offline=60.0
    )
    text = speculation.ratios({"on": [on, on], "off": [off, off]})
    assert "grounded 2.00 x, chat 1.00 x, job 1.25 x, offline beside chats 1.20 x" in text
    assert "+5.0 points; 2 of 8 answers changed" in text


def test_every_turn_repeats_what_was_said() -> None:
    chats = conversations(3, 4, 100, 10.0, seed=1)
    sizes = sorted(zip(chats.input_tokens.tolist(), (len(each.segments) for each in chats.content), strict=True))
    assert sizes == [(124 + 40 * turn, 2 + 2 * turn) for turn in range(4) for _ in range(3)]
    assert (np.diff(chats.arrived_at) >= 0).all()


def test_figures_of_features_are_pooled_over_rounds_and_relative_to_the_first_arm() -> None:
    turns, identity = features.FEATURES["turns"], features.FEATURES["identity"]
    runs = {"device only": [{"ttft": [0.4, 0.8]}, {"ttft": [0.6]}], "host tier": [{"ttft": [0.15]}]}
    assert features.ratios(turns, runs) == "TTFT P50 ms, host tier / device only: 0.25"
    same = {"calm": [{"answers": ["[1]"]}], "hard": [{"answers": ["[1]"]}]}
    assert features.equal_answers(identity, same) == "1 of 1 answers are equal"
    for other in ("[2]", "status 500"):
        with pytest.raises(SystemExit, match="only 0 of 1"):
            features.equal_answers(identity, same | {"hard": [{"answers": [other]}]})
    assert features.sizes_of(turns, ["chats=2", "think=0.5"]) == {"chats": 2, "think": 0.5}
    with pytest.raises(SystemExit, match="the load has chats"):
        features.sizes_of(turns, ["chairs=2"])


def test_random_requests_are_the_same_for_a_seed_and_answers_keep_every_bit() -> None:
    assert random_bodies(100, 1) == random_bodies(100, 1) != random_bodies(100, 2)
    body = {"choices": [{"logprobs": -0.1}], "usage": {"completion_tokens": 1}}
    assert all_of(body) != all_of(body | {"choices": [{"logprobs": -0.1 + 2**-55}]})
