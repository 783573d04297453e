"""OpenAI's Python library: chat, completions, responses, embeddings, files and batches."""

import asyncio
import json
import math
import time
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, WEATHER, begin, call, end, plan, refused, step

begin("openai")
demo = openai.OpenAI(base_url=f"{DEMO_URL}/v1", api_key="none", max_retries=0)
puppet = openai.OpenAI(base_url=f"{PUPPET_URL}/v1", api_key="none", max_retries=0)
MESSAGES: Any = [{"role": "user", "content": ASK}]
GREEDY: Any = {"model": DEMO, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}


class Person(BaseModel):
    name: str
    age: int
    city: str


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Seoul", "Bern"]


class Report(BaseModel):
    kind: Literal["city", "river"]
    score: int = Field(ge=0, le=9)


TOOL: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")


@step("chat, whole and streamed, with usage")
def _() -> None:
    whole = demo.chat.completions.create(**GREEDY)
    *chunks, last = demo.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and "Paris" in text
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@step("chat.completions.stream helper")
def _() -> None:
    with demo.chat.completions.stream(**GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds and "Paris" in (final.choices[0].message.content or "")


@step("chat.completions.parse")
def _() -> None:
    asked: Any = {**GREEDY, "messages": [{"role": "user", "content": PERSON}]}
    parsed = demo.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
    assert isinstance(parsed, Person) and parsed.age == 71


@step("logprobs of chat")
def _() -> None:
    choice = demo.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    assert (
        "".join(entry.token for entry in choice.logprobs.content if "<|" not in entry.token) == choice.message.content
    )
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)


@step("a turn after tools, from message.model_dump()")
def _() -> None:
    text = f"Weather? {plan([call('get_weather', city='Seoul'), call('get_weather', city='Bern')], 'Fog in both.')}"
    messages: list[Any] = [{"role": "user", "content": text}]
    first = puppet.chat.completions.create(model=PUPPET, messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    messages.append(first.message.model_dump())
    for each in first.message.tool_calls:
        assert each.type == "function" and set(json.loads(each.function.arguments)) == {"city"}
        messages.append({"role": "tool", "tool_call_id": each.id, "content": "fog"})
    second = puppet.chat.completions.create(model=PUPPET, messages=messages, tools=[TOOL]).choices[0]
    assert second.message.content == "Fog in both."
    messages += [second.message, {"role": "user", "content": "Thanks."}]
    assert puppet.chat.completions.create(model=PUPPET, messages=messages, tools=[TOOL]).choices[0].message.content


@step("streamed calls of tools, parsed")
def _() -> None:
    asked: Any = [{"role": "user", "content": plan([call("get_weather", city="Seoul")])}]
    with puppet.chat.completions.stream(model=PUPPET, messages=asked, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1 and final.finish_reason == "tool_calls"
    assert final.message.tool_calls
    assert final.message.tool_calls[0].function.parsed_arguments == GetWeather(city="Seoul")


@step("required and named tool_choice, tools beside response_format")
def _() -> None:
    asked: Any = {**GREEDY, "messages": [{"role": "user", "content": WEATHER}], "max_tokens": 100, "tools": [TOOL]}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = demo.chat.completions.create(**asked, tool_choice=choice).choices[0].message
        assert message.tool_calls and GetWeather.model_validate_json(message.tool_calls[0].function.arguments)
    answer = demo.chat.completions.parse(**asked, response_format=Report).choices[0].message
    assert answer.tool_calls or isinstance(answer.parsed, Report)


@step("reasoning_effort, verbosity, service_tier, prediction and n")
def _() -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        assert demo.chat.completions.create(**GREEDY, reasoning_effort=effort).choices[0].message.content
    fields: Any = {
        "verbosity": "low",
        "service_tier": "priority",
        "prediction": {"type": "content", "content": "Paris"},
    }
    assert len(demo.chat.completions.create(**GREEDY, **fields, n=3).choices) == 3


@step("completions: stream, echo with logprobs, max_tokens 0")
def _() -> None:
    fields: Any = {"model": DEMO, "prompt": "The capital of France", "temperature": 0}
    whole = demo.completions.create(**fields, max_tokens=8).choices[0].text
    assert whole == "".join(
        chunk.choices[0].text for chunk in demo.completions.create(**fields, max_tokens=8, stream=True)
    )
    scored = demo.completions.create(**fields, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == fields["prompt"] and scored.logprobs is not None and scored.logprobs.token_logprobs
    first, *others = scored.logprobs.token_logprobs
    assert first is None and others and all(math.isfinite(value) and value <= 0 for value in others)


@step("responses: create, stream, parse, input_tokens")
def _() -> None:
    fields: Any = {"model": DEMO, "input": ASK, "temperature": 0}
    whole = demo.responses.create(**fields)
    with demo.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == whole.output_text and whole.usage is not None
    assert isinstance(demo.responses.parse(**{**fields, "input": PERSON}, text_format=Person).output_parsed, Person)
    assert demo.responses.input_tokens.count(model=DEMO, input=ASK).input_tokens == whole.usage.input_tokens


@step("responses: a call, its output, and the items sent back")
def _() -> None:
    tool: Any = {"type": "function", "name": "get_weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}}  # fmt: skip
    items: list[Any] = [{"role": "user", "content": plan([call("get_weather", city="Seoul")], "Fog.")}]
    first = puppet.responses.create(model=PUPPET, input=items, tools=[tool], store=False)
    items += first.output
    for item in first.output:
        if item.type == "function_call":
            assert json.loads(item.arguments) == {"city": "Seoul"}
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "fog"})
    assert puppet.responses.create(model=PUPPET, input=items, tools=[tool], store=False).output_text == "Fog."


@step("embeddings, as floats and base64")
def _() -> None:
    packed = demo.embeddings.create(model=DEMO, input=["a", "b"]).data
    plain = demo.embeddings.create(model=DEMO, input=["a", "b"], encoding_format="float").data
    assert len(packed) == len(plain) == 2
    assert all(abs(a - b) < 1e-5 for a, b in zip(packed[0].embedding, plain[0].embedding, strict=True))


@step("models")
def _() -> None:
    assert DEMO in [model.id for model in demo.models.list()] and demo.models.retrieve(DEMO).id == DEMO


@step("files and batches")
def _() -> None:
    body = {"model": DEMO, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    content = "\n".join(map(json.dumps, [*lines, {**lines[0], "custom_id": "bad", "body": {**body, "n": 0}}])).encode()
    file = demo.files.create(file=("in.jsonl", content), purpose="batch")
    assert demo.files.wait_for_processing(file.id).status == "processed"
    batch = demo.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = demo.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id and batch.error_file_id
    rows = [json.loads(row) for row in demo.files.content(batch.output_file_id).text.splitlines()]
    assert {row["custom_id"] for row in rows} == {"0", "1", "2"}
    assert "Paris" in rows[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert batch.id in [each.id for each in demo.batches.list(limit=1)]
    assert {each.id for each in demo.files.list(limit=1)} >= {file.id, batch.output_file_id}
    assert demo.files.delete(file.id).deleted


@step("16 requests at once")
async def _() -> None:
    async with openai.AsyncOpenAI(base_url=f"{DEMO_URL}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**GREEDY) for _ in range(16)))
    assert all("Paris" in (answer.choices[0].message.content or "") for answer in answers)


@step("typed errors: 400 and 404")
def _() -> None:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.NotFoundError, {"model": "other"}),
    ]
    for kind, fields in wrong:
        try:
            demo.chat.completions.create(**{**GREEDY, **fields})
        except kind as error:
            assert error.request_id
        else:
            raise AssertionError(f"no {kind.__name__}")


@step("chat: tool_choice allowed_tools")
def _() -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    only: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    longer: Any = GREEDY | {"max_tokens": 200}
    message = demo.chat.completions.create(**longer, tools=[TOOL], tool_choice=only).choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "get_weather", message


@refused("responses: previous_response_id", "previous_response_id")
def _() -> None:
    demo.responses.create(model=DEMO, input=ASK, previous_response_id="resp_1")


@refused("chat: functions (use tools)", "functions")
def _() -> None:
    demo.chat.completions.create(**GREEDY, functions=[{"name": "f", "parameters": {}}])


@refused("files: purpose user_data", "purpose")
def _() -> None:
    demo.files.create(file=("a.txt", b"x"), purpose="user_data")


@refused("responses.retrieve (nothing is stored)")
def _() -> None:
    demo.responses.retrieve("resp_1")


@refused("moderations")
def _() -> None:
    demo.moderations.create(input="hi")


end()
