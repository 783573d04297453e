"""OpenAI Agents SDK over chat and responses: tools, output_type, and both together."""

from typing import Any, Literal

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("openai-agents", "openai")
set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int
    city: Literal["Bern", "Rome"]


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"fog in {city}"


FORM = '{"name": "Ida", "age": 71, "city": "Bern"}'
TOLD = [call("get_weather", city="Seoul")]


def use(kind: Any, name: str) -> None:
    def agent(model: str, url: str, **options: Any) -> Agent[Any]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return Agent(name="a", model=kind(model=model, openai_client=client), **options)

    @step(f"{name}: text")
    async def _() -> None:
        assert (await Runner.run(agent(DEMO, DEMO_URL), ASK)).final_output

    @step(f"{name}: tools, whole and streamed")
    async def _() -> None:
        told = plan(TOLD, "It is foggy.")
        assert (await Runner.run(agent(PUPPET, PUPPET_URL, tools=[get_weather]), told)).final_output == "It is foggy."
        stream = Runner.run_streamed(agent(PUPPET, PUPPET_URL, tools=[get_weather]), told)
        kinds = {event.type async for event in stream.stream_events()}
        assert stream.final_output == "It is foggy." and "run_item_stream_event" in kinds

    @step(f"{name}: output_type")
    async def _() -> None:
        assert isinstance((await Runner.run(agent(DEMO, DEMO_URL, output_type=Person), PERSON)).final_output, Person)

    @step(f"{name}: tools with output_type")
    async def _() -> None:
        both = agent(PUPPET, PUPPET_URL, tools=[get_weather], output_type=Person)
        assert (await Runner.run(both, plan(TOLD, FORM))).final_output == Person(name="Ida", age=71, city="Bern")


use(OpenAIChatCompletionsModel, "chat")
use(OpenAIResponsesModel, "responses")
end()
