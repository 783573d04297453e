"""The HTTP part, without vLLM: the middleware, the status file and the gauges."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tidemill_vllm import status
from tidemill_vllm.endpoint import FLEX_PRIORITY, FlexTier, Gauges
from tidemill_vllm.status import StatusFile, read_status


def priority_of(
    body: bytes, path: str = "/v1/chat/completions", headers: tuple[tuple[bytes, bytes], ...] = (), parts: int = 1
):
    """Return the priority header that the app behind the middleware sees, and the body that it reads."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen["headers"] = dict(scope["headers"])
        message, read = {"more_body": True}, b""
        while message.get("more_body"):
            message = await receive()
            read += message.get("body", b"")
        seen["body"], seen["then"] = read, await receive()

    size = -(-len(body) // parts)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    messages = [{"type": "http.request", "body": each, "more_body": True} for each in pieces]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(FlexTier(app)(scope, receive, None))  # type: ignore[arg-type]
    assert seen["body"] == body and seen["then"]["type"] == "http.disconnect"
    return seen["headers"].get(b"x-vllm-priority")


@pytest.mark.parametrize("parts", [1, 7])
def test_flex_becomes_a_priority(parts: int) -> None:
    flex = json.dumps({"model": "m", "service_tier": "flex"}).encode()
    assert priority_of(flex, parts=parts) == str(FLEX_PRIORITY).encode()
    assert priority_of(flex, "/base/v1/completions") == str(FLEX_PRIORITY).encode()


@pytest.mark.parametrize(
    "body",
    [b'{"service_tier": "auto"}', b'{"service_tier": "flex", "priority": 3}', b'{"service_tier": "flex"', b"[1]",
     b'["service_tier", "flex"]', b'{"messages": [{"content": "\\"service_tier\\": \\"flex\\""}]}'],
)  # fmt: skip
def test_other_bodies_get_none(body: bytes) -> None:
    assert priority_of(body) is None


def test_a_stated_header_stays() -> None:
    flex = b'{"service_tier": "flex"}'
    assert priority_of(flex, headers=((b"x-vllm-priority", b"2"),)) == b"2"
    assert priority_of(flex, "/v1/embeddings") is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(status.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_the_status_crosses_processes(folder: Path) -> None:
    own = StatusFile("abc-12")
    assert read_status("abc-12") is None
    own.write({"share": 0.5, "attainment": float("nan"), "classes": {"default": {"attainment": 1.0}}})
    found = read_status("abc-12")
    assert found is not None and found["share"] == 0.5 and found["attainment"] is None
    (folder / next(folder.iterdir()).name / "abc-12.json").write_text("{")
    assert read_status("abc-12") is None
    own.remove()
    own.remove()


def test_an_old_status_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusFile("x").write({"share": 1.0})
    later = time.time() + 60.0
    monkeypatch.setattr(status.time, "time", lambda: later)
    assert read_status("x") is None


def test_gauges_have_the_names_of_the_dashboard(folder: Path) -> None:
    pytest.importorskip("prometheus_client")
    assert not list(Gauges("x").collect())
    StatusFile("x").write({
        "share": 0.5, "attainment": 0.99, "offline_tokens_per_second": 10.0, "model_error": 0.1,
        "classes": {"default": {"attainment": 0.99}, "premium": {"attainment": float("nan")}},
    })  # fmt: skip
    found = {
        metric.name: [(sample.labels, sample.value) for sample in metric.samples] for metric in Gauges("x").collect()
    }
    assert found["tidemill_slo_class_attainment"] == [({"slo_class": "default"}, 0.99)]
    assert found["tidemill_offline_share"] == [({}, 0.5)] and found["tidemill_predictor_mape"] == [({}, 0.1)]
