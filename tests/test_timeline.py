"""The timeline: counters become minutes that outlive the server; `tidemill report` puts them into words."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from batch_tools import FAST, jsonl, line, open_folder, submit, until
from fake_engine import colocation_stats
from fixtures import StartServer
from support.http import get
from support.lazy import openai

from engine.api import RequestClass
from engine.client import EngineStats
from gateway.telemetry.timeline import FILE, KEPT_MINUTES, Minute, Timeline
from tidemill.client import ServerClient, server_options
from tidemill.commands.report import report, report_text

NOW = time.time() // 60 * 60


def stats(good: int, bad: int = 0, **fields: Any) -> EngineStats:
    busy = {RequestClass.ONLINE: 1, RequestClass.OFFLINE: 2}
    colocation = colocation_stats(good_requests=good, bad_requests=bad, **{"held": "", "breaker": "closed"} | fields)
    return EngineStats(running=busy, colocation=colocation)


def totals(answers: int) -> dict[str, int]:
    return {"answers": answers, "prompt_tokens": 100 * answers, "output_tokens": 10 * answers}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_counters_become_minutes_and_pauses_have_a_reason(tmp_path: Path) -> None:
    clock = Clock()
    timeline = Timeline(tmp_path / FILE, clock)
    assert not timeline.look(stats(5), totals(7)), "counts of before the start belong to no minute"
    for second, good, answers, fields in (
        (10, 6, 8, {}),
        (20, 6, 8, {"breaker": "open", "breaker_cause": "slo"}),
        (30, 7, 9, {"held": "no offline budget keeps the SLO"}),
        (70, 2, 1, {}),  # another engine process, whose counters begin with 0
    ):
        clock.now = NOW + second
        ended = timeline.look(stats(good, **fields), totals(answers))
        assert ended is (second == 70)
    first, second_minute = timeline.since(NOW)
    assert (first["good"], first["answers"], first["prompt"], first["output"]) == (2, 2, 200, 20)
    assert (first["paused"], first["why"]) == (20.0, "no offline budget keeps the SLO")
    assert (second_minute["good"], second_minute["answers"], second_minute["paused"]) == (2, 1, 0.0)
    timeline.write()
    assert [each["time"] for each in Timeline(tmp_path / FILE, clock).since(0)] == [NOW]


def test_a_minute_without_an_event_takes_no_room_and_a_file_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / FILE
    old = Minute(int(NOW) - 60 * (KEPT_MINUTES + 5), good=1)
    rows = [
        json.dumps({name: getattr(each, name) for name in Minute.__slots__}) for each in (old, Minute(int(NOW), bad=3))
    ]
    path.write_text("\n".join([*rows, '{"time": 5, "other": 1}', rows[1][:20]]))
    timeline = Timeline(path, clock)
    assert [(each["time"], each["bad"]) for each in timeline.since(0)] == [(NOW, 3)]
    assert path.read_text() == rows[1].replace(" ", "") + "\n", "the file is written anew without the others"
    for minute in range(1, 50):
        clock.now = NOW + 60 * minute
        assert not timeline.look(EngineStats(), totals(0))
    assert len(timeline.since(0)) == 1


def test_a_folder_that_cannot_be_written_loses_no_minute(tmp_path: Path) -> None:
    clock, folder = Clock(), tmp_path / "later"
    timeline = Timeline(folder / FILE, clock)
    for minute in range(4):
        clock.now = NOW + 60 * minute
        timeline.look(stats(minute), totals(0))
        timeline.write()
        if minute == 2:
            folder.mkdir()
    assert len((folder / FILE).read_text().splitlines()) == 2
    assert [each["good"] for each in Timeline(folder / FILE, clock).since(0)] == [1, 1]


def test_both_lines_of_a_minute_with_a_restart_count(tmp_path: Path) -> None:
    for good in (2, 3):
        timeline = Timeline(tmp_path / FILE, Clock())
        timeline.look(stats(0), totals(0))
        timeline.look(stats(good), totals(0))
        assert timeline.end_minute() and not timeline.end_minute()
        timeline.write()
    again = Timeline(tmp_path / FILE, Clock()).since(0)
    assert [(each["time"], each["good"]) for each in again] == [(NOW, 2), (NOW, 3)]


async def test_the_server_keeps_its_timeline_and_reports_it(start_server: StartServer, tmp_path: Path) -> None:
    folder = await open_folder(tmp_path / "state")
    served = await start_server("hello world", folder=folder, batch_limits=FAST)
    served.engine.snapshot = stats(0)
    recorder = served.app.state.recorder
    await recorder.record()
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        batch = await submit(client, jsonl(line(number) for number in range(3)))
        await until(client, batch.id)
    served.engine.snapshot = stats(99, 1)
    await recorder.record()
    minutes = (await get(served, "/dashboard/timeline?hours=1")).json()["minutes"]
    assert sum(each["good"] for each in minutes) == 99 and sum(each["answers"] for each in minutes) == 3
    assert (await get(served, "/dashboard/timeline?hours=x")).status_code == 400
    text = await asyncio.to_thread(lambda: report(ServerClient(server_options(served.url, None)), 12, 1e6, 0.0))
    assert "99.0% of 100 chats within their limits" in text and "3 answers" in text and "1 completed" in text
    assert f"worth {sum(each['prompt'] for each in minutes):,.2f}" in text
    await recorder.stop()
    assert sum(each["good"] for each in recorder.timeline.since(0)) == 99
    stored = await asyncio.to_thread(Timeline, tmp_path / "state" / FILE)
    assert sum(each["good"] for each in stored.since(0)) == 99, "a stop stores its minute"


def test_a_report_without_work_and_with_pauses() -> None:
    assert report_text([], [], NOW, 12).splitlines()[1:] == [
        "batch work: 0 answers, 0 output and 0 prompt tokens",
        "paused for chats: never",
        "batches: none",
    ]
    minute = {"time": NOW, "good": 3, "bad": 1, "refused": 2, "answers": 0, "prompt": 0, "output": 0}
    pauses = [{**minute, "paused": 90.0, "why": "chats missed their limits"}, {**minute, "paused": 0.0, "why": ""}]
    batches = [
        {"id": "batch_1", "status": "in_progress", "metadata": {"tidemill.eta": f"{NOW + 600:.0f}-{NOW + 840:.0f}"}},
        {"id": "batch_2", "status": "completed", "completed_at": NOW - 60},
        {"id": "batch_3", "status": "failed", "failed_at": NOW - 60 * 60 * 13},
    ]
    text = report_text(pauses, batches, NOW, 12)
    assert "75.0% of 8 chats within their limits, 4 refused" in text
    assert "paused for chats: 1:30 (chats missed their limits)" in text
    assert "batches: 1 completed; batch_1 in_progress, done in about 10 to 14 min" in text and "failed" not in text
