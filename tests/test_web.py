"""The page at `/`: its files and headers, the history and the stream of snapshots, and its modules under node."""

import asyncio
import json
import math
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import keys_of
from fake_engine import MODEL, colocation_stats
from fixtures import StartServer
from support.http import get
from support.lazy import openai

from engine.client import ClassStanding, EngineState, EngineStats, EngineView, PipelineStats
from gateway.web.routes import FILES

NODE_TESTS = Path(__file__).parent / "web"


async def test_the_page_and_each_of_its_files(start_server: StartServer) -> None:
    served = await start_server("hi")
    page = await get(served, "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert {"index.html", "app.js", "style.css", "icon.svg"} <= set(FILES)
    for name in FILES:
        answer = await get(served, f"/web/{name}")
        assert answer.status_code == 200 and answer.content == FILES[name].content
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_the_browser_has_is_not_sent_again(start_server: StartServer) -> None:
    served = await start_server("hi")
    etag = (await get(served, "/")).headers["etag"]
    again = await get(served, "/", **{"if-none-match": etag})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize("name", ["..%2f..%2fpyproject.toml", "app.py", "%00", "index.html%2f.."])
async def test_nothing_else_is_served(start_server: StartServer, name: str) -> None:
    served = await start_server("hi")
    assert (await get(served, f"/web/{name}")).status_code == 404


async def test_figures_are_for_keys_that_may_see_them_and_files_for_everybody(
    start_server: StartServer, tmp_path: Path
) -> None:
    served = await start_server("hi", api_key_file=keys_of(tmp_path, "a a", "b b metrics"))
    for path in ("/", "/web/app.js"):
        assert (await get(served, path)).status_code == 200
    for path in ("/dashboard/history", "/dashboard/events"):
        assert (await get(served, path)).status_code == 401
        refused = await get(served, path, authorization="Bearer a")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "metrics_forbidden"
    assert (await get(served, "/dashboard/history", authorization="Bearer b")).status_code == 200


async def test_snapshots_follow_one_another_and_show_the_chat_that_ended(start_server: StartServer) -> None:
    served = await start_server("hello world")
    recorder = served.app.state.recorder
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", f"{served.url}/dashboard/events") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = stream.aiter_lines()
        await next_event(events)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as chats:
            await chats.completions.create(model=MODEL, prompt="hi")
        while not (snapshot := await next_event(events))["chats"]:
            pass
    chat = snapshot["chats"][0]
    assert chat["ttft"] == pytest.approx(0.01) and chat["gap"] == pytest.approx(0.01)  # the fake engine's clock
    assert snapshot["ready"] is True and set(snapshot["running"]) == {"online", "offline"}
    history = (await get(served, "/dashboard/history")).json()["snapshots"]
    assert [s["time"] for s in history] == sorted(s["time"] for s in history)
    assert json.loads(await recorder.record())["chats"] == []  # each chat is in one snapshot


async def test_objectives_are_as_the_server_judges_them(start_server: StartServer) -> None:
    served = await start_server("hi")
    assert json.loads(await served.app.state.recorder.record())["objectives"] == []
    served.engine.snapshot = EngineStats(colocation=colocation_stats())
    snapshot = json.loads(await served.app.state.recorder.record())
    assert snapshot["attainment_target"] == 0.99
    assert snapshot["objectives"] == [
        {"objective": "ttft_p99=1s", "value": 0.9, "bound": 1.0, "attainment": 0.75},
        {"objective": "tbt_mean=5%", "value": 0.05, "bound": None, "attainment": None},
    ]


async def test_classes_and_mechanisms_are_shown_and_a_class_has_its_own_target(start_server: StartServer) -> None:
    served = await start_server("hi")
    assert json.loads(await served.app.state.recorder.record())["mechanisms"] == {}
    classes = (
        ClassStanding("default", "ttft_p99=1s", 0.995),
        ClassStanding("premium", "ttft_p90=300ms", 0.89),
        ClassStanding("means", "ttft_mean=1s", math.nan),
    )
    learned = {"searches_made": 2, "search_seconds": 9.0}
    served.engine.snapshot = EngineStats(
        colocation=colocation_stats(classes=classes, learned=learned, model_refits_refused=1),
        plans={"made": 7, "late": 1},
        knapsack={"kv": 0},
        drafted_tokens=10,
        accepted_tokens=4,
        pipelines=PipelineStats(((0, 1),), 1, 0, 0, False),
    )
    snapshot = json.loads(await served.app.state.recorder.record())
    assert [(each["name"], each["target"]) for each in snapshot["classes"]] == [
        ("default", 0.99), ("premium", 0.9), ("means", None)
    ]  # fmt: skip
    assert snapshot["classes"][2]["attainment"] is None
    assert snapshot["mechanisms"] == {
        "plans": {"made": 7, "late": 1},
        "drafts": {"verified": 10, "right": 4},
        "searches": {"made": 2, "failed": 0},
        "refits": {"adopted": 0, "refused": 1},
        "drops": {"drops": 1, "restores": 0, "failed": 0},
    }
    metrics = (await get(served, "/metrics")).text.splitlines()
    targets = [line for line in metrics if line.startswith("tidemill_slo_class_attainment_target{")]
    assert targets == [
        'tidemill_slo_class_attainment_target{slo_class="default"} 0.99',
        'tidemill_slo_class_attainment_target{slo_class="premium"} 0.9',
    ]


async def test_each_of_several_engines_is_shown(start_server: StartServer) -> None:
    served = await start_server("hi")
    assert json.loads(await served.app.state.recorder.record())["engines"] == []
    one = EngineStats(
        prefill_tokens=30,
        decode_tokens=12,
        offline_prefill_tokens=15,
        offline_decode_tokens=5,
        units_total=100,
        units_owned=25,
    )
    served.engine.snapshot = EngineStats(engines=(EngineView(0, EngineState.DEAD, "it ended", 7, 2, 0.0, one),))
    (shown,) = json.loads(await served.app.state.recorder.record())["engines"]
    assert shown["state"] == "dead" and shown["trouble"] == "it ended"
    assert (shown["computed_tokens"], shown["offline_tokens"], shown["routed"], shown["moved"]) == (42, 20, 7, 2)
    assert shown["units"] == {"total": 100, "owned": 25}


async def next_event(lines: Any) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream ended")


async def test_many_pages_share_one_snapshot_and_leave_nothing_behind(start_server: StartServer) -> None:
    served = await start_server("hi")
    recorder = served.app.state.recorder
    followers = [recorder.follow() for _ in range(10)]
    waiting = [asyncio.ensure_future(anext(follower)) for follower in followers]
    await asyncio.sleep(0)
    await recorder.record()
    events = await asyncio.gather(*waiting)
    assert len({id(event) for event in events}) == 1
    for follower in followers:
        await follower.aclose()
    assert recorder._followers == 0


async def test_a_stream_ends_with_the_server(start_server: StartServer) -> None:
    served = await start_server("hi")
    recorder = served.app.state.recorder

    async def read() -> int:
        return len([event async for event in recorder.follow()])

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    await recorder.stop()
    assert await reader <= 1 and recorder._followers == 0


def test_no_file_of_the_page_reaches_another_server_or_writes_html() -> None:
    static = resources.files("gateway.web").joinpath("static")
    for item in static.iterdir():
        text = item.read_text()
        assert "https://" not in text and "innerHTML" not in text and "eval(" not in text, item.name
        if item.name.endswith(".html"):
            assert "style=" not in text and "onclick" not in text and "<script>" not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's modules are tested by node")
def test_the_modules_of_the_page() -> None:
    run = subprocess.run(
        ["node", "--test", *map(str, sorted(NODE_TESTS.glob("*.test.mjs")))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# pass 0" not in run.stdout
