"""smolagents: the model, streams, tools, and both kinds of agent."""

from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from steps import ASK, DEMO, DEMO_URL, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("smolagents", "openai")
demo = OpenAIServerModel(model_id=DEMO, api_base=f"{DEMO_URL}/v1", api_key="none")
puppet = OpenAIServerModel(model_id=PUPPET, api_base=f"{PUPPET_URL}/v1", api_key="none")
ASKED: Any = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]


@tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: The city.
    """
    return f"fog in {city}"


@step("generate and generate_stream")
def _() -> None:
    assert demo.generate(ASKED).content
    assert "".join(piece.content or "" for piece in demo.generate_stream(ASKED))


@step("ToolCallingAgent")
def _() -> None:
    told = plan([call("get_weather", city="Seoul")], [call("final_answer", answer="It is foggy.")])
    assert ToolCallingAgent(tools=[get_weather], model=puppet, max_steps=3).run(told) == "It is foggy."


@step("CodeAgent with structured outputs")
def _() -> None:
    told = plan('{"thought": "I know.", "code": "final_answer(get_weather(\'Seoul\'))"}')
    agent = CodeAgent(tools=[get_weather], model=puppet, max_steps=1, use_structured_outputs_internally=True)
    assert agent.run(told) == "fog in Seoul"


end()
