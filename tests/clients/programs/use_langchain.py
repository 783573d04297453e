"""LangChain: ChatOpenAI over chat and responses, ChatAnthropic, an agent, and the standard tests of langchain-tests."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("langchain-openai", "langchain", "langchain-anthropic", "langchain-tests")
OPTIONS: Any = {"base_url": f"{DEMO_URL}/v1", "api_key": "none", "model": DEMO, "max_retries": 0, "max_tokens": 100}
PUPPETS: Any = {**OPTIONS, "base_url": f"{PUPPET_URL}/v1", "model": PUPPET}
TOLD = plan([call("get_weather", city="Seoul")], "It is foggy.")
demo = ChatOpenAI(**OPTIONS, temperature=0, stream_usage=True)


class Person(BaseModel):
    name: str
    age: int
    city: Literal["Bern", "Rome"]


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"fog in {city}"


@step("invoke, stream with usage, batch")
def _() -> None:
    chunks = list(demo.stream(ASK))
    assert "".join(str(chunk.content) for chunk in chunks) == demo.invoke(ASK).content
    assert any(chunk.usage_metadata for chunk in chunks) and len(demo.batch([ASK] * 4)) == 4


@step("with_structured_output: json_schema, function_calling, json_mode")
def _() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        question = PERSON + (" Answer in JSON." if method == "json_mode" else "")
        assert isinstance(demo.with_structured_output(Person, method=method).invoke(question), Person), method


@step("create_agent over chat and over responses")
def _() -> None:
    for options in ({}, {"use_responses_api": True, "store": False}):
        agent = create_agent(ChatOpenAI(**PUPPETS, **options), tools=[get_weather])
        messages = agent.invoke({"messages": [("user", TOLD)]})["messages"]
        assert messages[-1].text == "It is foggy." and messages[-2].content == "fog in Seoul"


@step("create_agent with tools and response_format, by a tool and by a form")
def _() -> None:
    person = Person(name="Ida", age=71, city="Bern")
    turns: Any = (ToolStrategy, [call("Person", **person.model_dump())]), (ProviderStrategy, person.model_dump_json())
    for strategy, turn in turns:
        agent = create_agent(ChatOpenAI(**PUPPETS), tools=[get_weather], response_format=strategy(Person))
        told = plan([call("get_weather", city="Seoul")], turn)
        assert agent.invoke({"messages": [("user", told)]})["structured_response"] == person


@step("logprobs, service_tier, reasoning_effort")
def _() -> None:
    model = ChatOpenAI(**OPTIONS, logprobs=True, top_logprobs=2, service_tier="flex", reasoning_effort="minimal")
    assert model.invoke(ASK).response_metadata["logprobs"]["content"]


@step("OpenAI (completions) and OpenAIEmbeddings")
def _() -> None:
    assert OpenAI(**{**OPTIONS, "max_tokens": 8}, n=2, best_of=2).generate(["The capital of"]).generations[0][1]
    embeddings = OpenAIEmbeddings(
        base_url=OPTIONS["base_url"], api_key="none", model=DEMO, check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["hi", "you"])) == 2


@step("ChatAnthropic: tools and structured output")
def _() -> None:
    puppet = ChatAnthropic(model=PUPPET, base_url=PUPPET_URL, api_key="none", max_tokens=200)
    agent = create_agent(puppet, tools=[get_weather])
    assert agent.invoke({"messages": [("user", TOLD)]})["messages"][-1].text == "It is foggy."
    model = ChatAnthropic(model=DEMO, base_url=DEMO_URL, api_key="none", max_tokens=100, temperature=0)
    assert isinstance(model.with_structured_output(Person).invoke(PERSON), Person)


class Outcomes:
    """Plugin of pytest: the names of tests by outcome."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append(name)
        elif report.when == "call" and report.passed:
            self.passed.append(name)


@step("standard tests of langchain-tests for chat and embeddings")
def _() -> None:
    outcomes = Outcomes()
    file = Path(__file__).with_name("langchain_standard.py")
    words = ["-q", "-c", os.devnull, "--noconftest", "--rootdir", ".", "-o", "asyncio_mode=auto", str(file)]
    words += ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
    pytest.main(words, plugins=[outcomes])
    sys.stdout.flush()
    assert outcomes.passed and not outcomes.failed, outcomes.failed


end()
