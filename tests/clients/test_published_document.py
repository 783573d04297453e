"""OpenAI's published OpenAPI document against a live server with the packaged model.

`TIDEMILL_OPENAI_DOCUMENT` is the path of `openapi.json` (repository openai/openai-openapi). A request that the document
allows is answered without a 5xx, and with the document's error object if it is refused; every answer, event, list and
result row has the document's schema.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings

DOCUMENT = os.environ.get("TIDEMILL_OPENAI_DOCUMENT", "")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not DOCUMENT, reason="TIDEMILL_OPENAI_DOCUMENT: path of OpenAI's openapi.json"),
    pytest.mark.timeout(600),
]
MODEL = "tidemill-demo"
SHORT = {
    "/chat/completions": {"max_completion_tokens": 8},
    "/completions": {"max_tokens": 8},
    "/responses": {"max_output_tokens": 16},
    "/responses/input_tokens": {},
    "/embeddings": {},
}
"""Fields that bound the answers of each endpoint of a model."""
OPERATIONS = [
    *(("POST", path) for path in SHORT),
    ("GET", "/models"), ("GET", "/models/{model}"),
    ("POST", "/files"), ("GET", "/files"), ("GET", "/files/{file_id}"), ("DELETE", "/files/{file_id}"),
    ("GET", "/files/{file_id}/content"),
    ("POST", "/batches"), ("GET", "/batches"), ("GET", "/batches/{batch_id}"), ("POST", "/batches/{batch_id}/cancel"),
]  # fmt: skip
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": CITY, "strict": True}
FORM = {"name": "place", "schema": CITY, "strict": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40}
TEXT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 8}
ITEM: dict[str, Any] = {"input": "What is the capital of France?", "max_output_tokens": 40}
FLAT_TOOL = {"type": "function", **FUNCTION}
SERVED = [
    *(("/chat/completions", {**CHAT, **more}) for more in (
        {}, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, {"n": 3},
        {"logprobs": True, "top_logprobs": 3}, {"response_format": {"type": "json_schema", "json_schema": FORM}},
        {"service_tier": "flex", "stop": ["a"], "seed": 7, "stream_options": None},
    )),
    *(("/completions", {**TEXT, **more}) for more in (
        {}, {"n": 2, "logprobs": 3}, {"echo": True, "logprobs": 1}, {"max_tokens": 0, "prompt": [[5, 6], [7]]},
    )),
    *(("/responses", {**ITEM, **more}) for more in (
        {}, {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
        {"tools": [FLAT_TOOL], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", **FORM}, "verbosity": "low"}},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 16},
    )),
    ("/responses/input_tokens", {"input": "hi", "tools": [FLAT_TOOL]}),
    ("/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
]  # fmt: skip


def as_json_schema(node: Any) -> Any:
    """Replace `nullable`, which the document still uses, by JSON Schema's union with null."""
    if isinstance(node, list):
        return [as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: as_json_schema(value) for name, value in node.items()}
    return {"anyOf": [node, {"type": "null"}]} if node.pop("nullable", False) is True else node


def without_known_nulls(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Remove nulls that OpenAI sends and its texts or examples describe, but its schemas do not allow."""
    if path == "/completions":
        if value.get("usage", value) is None:  # described at stream_options
            del value["usage"]
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            scores = choice["logprobs"]
            if scores and scores["token_logprobs"][:1] == [None]:  # the first token of an echoed prompt
                scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}
    response = value.get("response")
    if path == "/responses" and response and response["usage"] is None:  # the examples of the first two events
        del response["usage"]
    if path in ("/batches", "/files"):
        ends = {name: value[name] or "" for name in ("first_id", "last_id") if name in value}  # of an empty list
        value = {**value, **ends}
        if "data" in value:
            value["data"] = [without_known_nulls(path, item) for item in value["data"]]
    if value.get("object") == "batch":  # its times, files and errors
        value = {name: item for name, item in value.items() if item is not None}
    return value


class Published:
    """The document, limited to the served paths, and its schemas."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text())
        self.paths = {name: whole["paths"][name] for _, name in OPERATIONS}
        self.document = {**whole, "paths": self.paths, "servers": []}
        self._schemas = {"components": as_json_schema(whole["components"])}

    def check(self, schema: dict[str, Any] | str, value: Any) -> None:
        """Raise if `value` does not fit the schema, or the component of that name."""
        found = {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else as_json_schema(schema)
        jsonschema_rs.validator_for({**self._schemas, **found}).validate(value)

    def check_answer(self, method: str, path: str, answer: httpx.Response) -> Any:
        """Check the status and the body, or every event, of an answer; return a JSON body."""
        assert answer.status_code < 500, answer.text[:500]
        if answer.status_code >= 400:
            return self.check("ErrorResponse", answer.json())
        if path.endswith("/content"):
            return None
        content = self.paths[path][method.lower()]["responses"]["200"]["content"]
        if not answer.headers["content-type"].startswith("text/event-stream"):
            self.check(content["application/json"]["schema"], without_known_nulls(path, answer.json()))
            return answer.json()
        schema = content.get("text/event-stream", content["application/json"])["schema"]
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        for event in events:
            self.check(schema, without_known_nulls(path, event))
        assert events
        return None


@pytest.fixture(scope="module")
def published() -> Published:
    return Published(Path(DOCUMENT))


@pytest.fixture(scope="module")
def client(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{demo_url}/v1", timeout=120) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_requests_of_the_document(published: Published, client: httpx.Client, method: str, path: str) -> None:
    """Send requests that the document allows; drop refused optional fields until the request is served or refused."""
    import schemathesis

    operation = schemathesis.openapi.from_dict(published.document)[path][method]

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        if path in SHORT and isinstance(case.body, dict):
            case.body = {**case.body, "model": MODEL, **SHORT[path]}
        while True:
            sent = case.call(base_url=str(client.base_url))
            headers = {name: values[0] for name, values in sent.headers.items() if name != "content-encoding"}
            answer = httpx.Response(sent.status_code, headers=headers, content=sent.content)
            published.check_answer(method, path, answer)
            param = answer.json()["error"]["param"] if answer.status_code == 400 else None
            field = str(param).split(".")[0].split("[")[0]
            if not isinstance(case.body, dict) or field not in case.body:
                break
            del case.body[field]

    send()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), SERVED)
def test_answers(published: Published, client: httpx.Client, path: str, body: dict[str, Any], stream: bool) -> None:
    if stream and path in ("/embeddings", "/responses/input_tokens"):
        pytest.skip("never streams")
    options: dict[str, Any] = {"stream": True} if stream else {}
    if stream and path.endswith("completions"):
        options["stream_options"] = {"include_usage": True}
    answer = client.post(path, json={"model": MODEL, **body, **options})
    assert answer.status_code == 200, answer.text
    published.check_answer("post", path, answer)


def test_files_and_batches(published: Published, client: httpx.Client) -> None:
    bodies = [{"model": MODEL, **CHAT, **more} for more in ({}, {"n": 2}, {"temperature": 9})]
    line = {"method": "POST", "url": "/v1/chat/completions"}
    content = "\n".join(json.dumps({**line, "custom_id": str(i), "body": body}) for i, body in enumerate(bodies))
    answer = client.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content.encode())})
    file = published.check_answer("post", "/files", answer)
    job = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = published.check_answer("post", "/batches", client.post("/batches", json=job))
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.05)
        batch = published.check_answer("get", "/batches/{batch_id}", client.get(f"/batches/{batch['id']}"))
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    for name in ("output_file_id", "error_file_id"):
        published.check_answer("get", "/files/{file_id}", client.get(f"/files/{batch[name]}"))
    rows = client.get(f"/files/{batch['output_file_id']}/content").text.splitlines()
    assert len(rows) == 2
    for row in rows:
        published.check("CreateChatCompletionResponse", json.loads(row)["response"]["body"])
    for path in ("/files", "/batches", "/models"):
        published.check_answer("get", path, client.get(path))
    published.check_answer("delete", "/files/{file_id}", client.delete(f"/files/{file['id']}"))
