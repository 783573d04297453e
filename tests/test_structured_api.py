"""Structured output through HTTP: every spelling of it, its errors, streams and batches, with the demo model."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from batch_tools import FAST, check_ended, client_of, jsonl, line, open_folder, submit, until
from fake_engine import Served, demo_engine, serve
from fixtures import refuse_blocking
from integrity import check_core
from pydantic import BaseModel, Field
from support.http import post

MODEL = "tidemill-demo"
CHAT = "/v1/chat/completions"
HOT = {"temperature": 2.0, "max_tokens": 150}


class Point(BaseModel):
    kind: Literal["star", "planet"]
    x: Annotated[int, Field(ge=0, le=99)]
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]


@asynccontextmanager
async def server(template: str | None = None, **options: Any) -> AsyncIterator[Served]:
    engine, tokenizer = demo_engine(template)
    with refuse_blocking():
        async with serve(engine, tokenizer, None, served_model_name=(MODEL,), **options) as served:
            yield served
    check_core(engine.core)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with server() as served:
        yield served


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say it"}], **HOT, **fields}


async def test_the_official_client_parses_what_it_asked_for(served: Served) -> None:
    async with client_of(served) as client:
        for seed in range(2):
            answer = await client.chat.completions.parse(**ask(response_format=Point, seed=seed))
            assert isinstance(answer.choices[0].message.parsed, Point)
        async with client.chat.completions.stream(**ask(response_format=Point, seed=1, temperature=0.0)) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop" and isinstance(final.choices[0].message.parsed, Point)


SCHEMA = {**Point.model_json_schema(), "additionalProperties": False}
SPELLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": False}}},
        "json",
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, "object"),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, "json"),
    "structured json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
    "structured object": ({"structured_outputs": {"json_object": True}}, "object"),
    "structured regex": ({"structured_outputs": {"regex": "yes|no"}}, "yes or no"),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes or no"),
    "structured grammar": ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes or no"),
    "guided_json": ({"guided_json": SCHEMA}, "json"),
    "guided_regex": ({"guided_regex": "yes|no"}, "yes or no"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes or no"),
    "guided_grammar": ({"guided_grammar": 'start: "yes" | "no"'}, "yes or no"),
}


def check(text: str, kind: str) -> None:
    if kind == "yes or no":
        assert text in ("yes", "no")
    elif kind == "object":
        assert isinstance(json.loads(text), dict)
    else:
        jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text))


@pytest.mark.slow
async def test_every_spelling_of_both_endpoints(served: Served) -> None:
    for number, (fields, kind) in enumerate(SPELLINGS.values()):
        chat = await post(served, **ask(**fields, seed=number, n=2))
        raw = await post(served, "/v1/completions", model=MODEL, prompt="Say it: ", **HOT, **fields, seed=number)
        assert chat.status_code == raw.status_code == 200, (chat.text, raw.text)
        texts = [(c["message"]["content"], c["finish_reason"]) for c in chat.json()["choices"]]
        texts += [(c["text"], c["finish_reason"]) for c in raw.json()["choices"]]
        for text, reason in texts:
            assert reason in ("stop", "length")
            if reason == "stop":
                check(text, kind)


async def test_plain_text_is_no_form(served: Served) -> None:
    answer = await post(served, **ask(response_format={"type": "text"}, max_tokens=5, ignore_eos=True))
    assert answer.status_code == 200


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
        '"not"',
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "Invalid"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more", "Unknown"),
    ({"structured_outputs": {}}, "structured_outputs", "must have json"),
    ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "together"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "together"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "Invalid"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
]


async def test_what_is_refused_names_its_parameter(served: Served) -> None:
    for fields, param, word in REFUSED:
        answer = await post(served, **ask(**fields))
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error" and error["code"], error
        assert word in error["message"], error
        streamed = await post(served, **ask(**fields, stream=True))
        assert streamed.status_code == 400 and streamed.json() == answer.json()


@pytest.mark.slow
async def test_a_row_of_a_batch_fails_with_the_error_that_http_gives(tmp_path: Path) -> None:
    folder = await open_folder(tmp_path / "state")
    forms = {
        "good": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
        "bad": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "array", "contains": {}}}},
    }
    lines = [
        line(f"{kind}-{number}", CHAT, **ask(response_format=form, seed=number))
        for kind, form in forms.items()
        for number in range(4)
    ]
    async with server(folder=folder, batch_limits=FAST) as served, client_of(served) as client:
        batch = await submit(client, jsonl(lines), CHAT)
        batch = await until(client, batch.id, "completed")
        output, errors = await check_ended(client, batch, [each["custom_id"] for each in lines])
        direct = await post(served, **ask(response_format=forms["bad"]))
    assert set(output) == {f"id-good-{number}" for number in range(4)}
    for row in output.values():
        check(row["response"]["body"]["choices"][0]["message"]["content"], "json")
    for row in errors.values():
        assert row["response"]["status_code"] == 400
        assert row["response"]["body"] == direct.json() and '"contains"' in direct.json()["error"]["message"]
