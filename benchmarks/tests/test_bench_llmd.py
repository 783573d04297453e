"""The live form of llm-d's case 491: its workload, and how lines without a gateway are judged."""

import pytest

from benchmarks import llmd_live
from loadgen.records import RequestRecord


def test_the_workload_is_the_issues_in_small() -> None:
    case = llmd_live.make_case(1.5, 90.0, 10, None, 0)
    assert case.seconds == 1800.0 and case.measured == (360.0, 1710.0), "two cycles of warm-up, the last burst's end"
    assert case.made.online is not None and set(case.made.online.input_tokens) == {128}
    assert set(case.made.online.output_tokens) == {32}
    assert [job.completion_window for job in case.made.jobs] == ["1800s", "7200s", "86400s"]
    answers = case.made.jobs[0].lines.output_tokens
    assert len(answers) == 1440 and answers.mean() == pytest.approx(125, rel=0.1)
    assert answers.std() == pytest.approx(100, rel=0.2)


def test_a_line_without_a_gateway_counts_by_the_window_of_its_job() -> None:
    case = llmd_live.make_case(1.0, 10.0, 2, 1, 0)
    ended = (41.0, 159.0, 1919.0)
    lines = [
        RequestRecord(i, "online", 0.0, 128, 2, ended_at=at, outcome="ok", chunk_at=[at], chunk_tokens=[2])
        for i, at in enumerate(ended)
    ]
    tokens, kept, done = llmd_live.judge_lines(lines, case)
    assert kept == pytest.approx(2 / 3) and done == 1919.0, "the first job has 40 s"
    assert sum(each for _, each in tokens) == 3 * 130
