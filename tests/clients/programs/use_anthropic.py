"""Anthropic's Python library: messages, streams, tools, the tool runner and message batches."""

import time
from typing import Any

import anthropic
from pydantic import BaseModel
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, WEATHER, begin, call, end, plan, step

begin("anthropic")
demo = anthropic.Anthropic(base_url=DEMO_URL, api_key="none", max_retries=0)
puppet = anthropic.Anthropic(base_url=PUPPET_URL, api_key="none", max_retries=0)
FIELDS: Any = {"model": DEMO, "max_tokens": 40, "messages": [{"role": "user", "content": ASK}]}
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}


class Person(BaseModel):
    name: str
    age: int
    city: str


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@step("messages, whole and streamed, with usage and count_tokens")
def _() -> None:
    greedy: Any = {**FIELDS, "extra_body": {"temperature": 0}}
    whole = demo.messages.create(**greedy)
    with demo.messages.stream(**greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final) and "Paris" in text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = demo.messages.count_tokens(model=DEMO, messages=FIELDS["messages"]).input_tokens
    for usage in (whole.usage, final.usage):
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@step("system blocks with cache_control, stop_sequences, a prefilled answer")
def _() -> None:
    system: Any = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]
    assert demo.messages.create(**FIELDS, system=system, stop_sequences=["zzz"]).content
    prefilled: Any = [*FIELDS["messages"], {"role": "assistant", "content": "The capital"}]
    assert demo.messages.create(**{**FIELDS, "messages": prefilled}).content


@step("tools: any, strict, results with is_error")
def _() -> None:
    asked: Any = {**FIELDS, "max_tokens": 100, "messages": [{"role": "user", "content": WEATHER}]}
    tool: Any = {**TOOL, "strict": True, "input_schema": {**CITY, "additionalProperties": False}}
    message = demo.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use" and message.content[-1].type == "tool_use"
    assert set(message.content[-1].input) == {"city"}  # type: ignore[call-overload]
    told = [{"role": "user", "content": plan([call("get_weather", city="Seoul")], "It failed.")}]
    first = puppet.messages.create(model=PUPPET, max_tokens=200, tools=[TOOL], messages=told)  # type: ignore[arg-type]
    used = first.content[-1]
    assert used.type == "tool_use" and used.input == {"city": "Seoul"}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "no such city", "is_error": True}
    turns: Any = [*told, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = puppet.messages.create(model=PUPPET, max_tokens=200, tools=[TOOL], messages=turns)
    assert text_of(second) == "It failed."


@step("messages.parse")
def _() -> None:
    asked: Any = {"model": DEMO, "max_tokens": 60, "messages": [{"role": "user", "content": PERSON}]}
    assert isinstance(demo.messages.parse(**asked, output_format=Person).parsed_output, Person)


@step("beta.messages.tool_runner")
def _() -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return "fog, 7 degrees"

    told: Any = [{"role": "user", "content": plan([call("get_weather", city="Seoul")], "It is foggy.")}]
    runner = puppet.beta.messages.tool_runner(model=PUPPET, max_tokens=200, tools=[get_weather], messages=told)
    assert text_of(runner.until_done()) == "It is foggy." and asked == ["Seoul"]


@step("models")
def _() -> None:
    assert [model.id for model in demo.models.list()] == [DEMO]
    model = demo.models.retrieve(DEMO)
    assert model.type == "model" and model.display_name == DEMO


@step("message batches")
def _() -> None:
    requests: Any = [{"custom_id": name, "params": FIELDS} for name in ("a", "b")]
    requests.append({"custom_id": "bad", "params": {**FIELDS, "nonsense": 1}})
    batch = demo.messages.batches.create(requests=requests)
    while batch.processing_status != "ended":
        time.sleep(0.1)
        batch = demo.messages.batches.retrieve(batch.id)
    results = {row.custom_id: row.result.type for row in demo.messages.batches.results(batch.id)}
    assert results == {"a": "succeeded", "b": "succeeded", "bad": "errored"}
    assert batch.id in [each.id for each in demo.messages.batches.list(limit=1)]
    assert demo.messages.batches.delete(batch.id).id == batch.id


@step("typed errors: 400 and 404")
def _() -> None:
    for kind, fields in ((anthropic.BadRequestError, {"max_tokens": 0}), (anthropic.NotFoundError, {"model": "other"})):
        try:
            demo.messages.create(**{**FIELDS, **fields})
        except kind as error:
            assert error.request_id
        else:
            raise AssertionError(f"no {kind.__name__}")


end()
