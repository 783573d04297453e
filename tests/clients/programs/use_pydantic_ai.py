"""pydantic-ai over chat and responses: text, tools, and each kind of output."""

from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("pydantic-ai-slim", "openai")
TOLD = plan([call("get_weather", city="Seoul")], "It is foggy.")
FORM = '{"name": "Ida", "age": 71, "city": "Bern"}'


class Person(BaseModel):
    name: str
    age: int
    city: Literal["Bern", "Rome"]


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"fog in {city}"


def use(kind: Any, name: str) -> None:
    def model(model_name: str, url: str) -> Any:
        return kind(model_name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))

    @step(f"{name}: text, whole and streamed")
    async def _() -> None:
        agent = Agent(model(DEMO, DEMO_URL), model_settings={"temperature": 0, "max_tokens": 40})
        whole = (await agent.run(ASK)).output
        async with agent.run_stream(ASK) as stream:
            assert "".join([piece async for piece in stream.stream_text(delta=True)]) == whole

    @step(f"{name}: a tool and the turn after it")
    async def _() -> None:
        agent = Agent(model(PUPPET, PUPPET_URL), tools=[get_weather])
        assert (await agent.run(TOLD)).output == "It is foggy."

    @step(f"{name}: ToolOutput and NativeOutput")
    async def _() -> None:
        for output in (ToolOutput, NativeOutput):
            agent = Agent(model(DEMO, DEMO_URL), output_type=output(Person), model_settings={"temperature": 0})
            assert isinstance((await agent.run(PERSON)).output, Person), output

    @step(f"{name}: PromptedOutput")
    async def _() -> None:
        agent = Agent(model(PUPPET, PUPPET_URL), output_type=PromptedOutput(Person))
        assert (await agent.run(plan(FORM))).output == Person(name="Ida", age=71, city="Bern")

    @step(f"{name}: a tool with NativeOutput")
    async def _() -> None:
        agent = Agent(model(PUPPET, PUPPET_URL), tools=[get_weather], output_type=NativeOutput(Person))
        assert (await agent.run(plan([call("get_weather", city="Seoul")], FORM))).output.age == 71


use(OpenAIChatModel, "chat")
use(OpenAIResponsesModel, "responses")
end()
