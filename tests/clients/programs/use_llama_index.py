"""LlamaIndex's OpenAILike."""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("llama-index-llms-openai-like", "llama-index-core")
OPTIONS: Any = {"api_key": "none", "is_chat_model": True, "context_window": 2048, "max_retries": 0, "temperature": 0}
demo = OpenAILike(model=DEMO, api_base=f"{DEMO_URL}/v1", is_function_calling_model=True, **OPTIONS)
puppet = OpenAILike(model=PUPPET, api_base=f"{PUPPET_URL}/v1", is_function_calling_model=True, **OPTIONS)


class Person(BaseModel):
    name: str
    age: int
    city: Literal["Bern", "Rome"]


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"fog in {city}"


@step("complete, chat, stream_chat")
def _() -> None:
    asked = [ChatMessage(role="user", content=ASK)]
    whole = demo.chat(asked).message.content
    assert "".join(chunk.delta or "" for chunk in demo.stream_chat(asked)) == whole and demo.complete(ASK).text


@step("structured output by tools and by response_format")
def _() -> None:
    assert isinstance(demo.as_structured_llm(Person).complete(PERSON).raw, Person)
    native = OpenAILike(model=DEMO, api_base=f"{DEMO_URL}/v1", should_use_structured_outputs=True, **OPTIONS)
    assert isinstance(native.structured_predict(Person, PromptTemplate(PERSON)), Person)


@step("predict_and_call")
def _() -> None:
    told = plan([call("get_weather", city="Seoul")])
    assert puppet.predict_and_call([FunctionTool.from_defaults(get_weather)], told).response == "fog in Seoul"


@step("completions")
def _() -> None:
    model = OpenAILike(model=DEMO, api_base=f"{DEMO_URL}/v1", **{**OPTIONS, "is_chat_model": False})
    assert model.complete("The capital of France", max_tokens=8).text


end()
