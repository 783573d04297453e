"""instructor in all modes that OpenAI's client has, and its partial objects."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel
from steps import DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("instructor", "openai")
demo = openai.OpenAI(base_url=f"{DEMO_URL}/v1", api_key="none", max_retries=0)
puppet = openai.OpenAI(base_url=f"{PUPPET_URL}/v1", api_key="none", max_retries=0)
FIELDS: Any = {"model": DEMO, "messages": [{"role": "user", "content": PERSON}], "max_retries": 0, "temperature": 0}


class Person(BaseModel):
    name: str
    age: int
    city: Literal["Bern", "Rome"]


for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"):

    @step(mode)
    def _(mode: str = mode) -> None:
        client = instructor.from_openai(demo, mode=instructor.Mode[mode])
        assert isinstance(client.chat.completions.create(**FIELDS, response_model=Person), Person)


@step("RESPONSES_TOOLS")
def _() -> None:
    client = instructor.from_openai(demo, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=DEMO, input=PERSON, response_model=Person, max_retries=0, temperature=0, max_output_tokens=100
    )
    assert isinstance(found, Person)


@step("MD_JSON")
def _() -> None:
    client = instructor.from_openai(puppet, mode=instructor.Mode.MD_JSON)
    told = plan('```json\n{"name": "Ida", "age": 71, "city": "Bern"}\n```')
    found = client.chat.completions.create(
        model=PUPPET, messages=[{"role": "user", "content": told}], response_model=Person, max_retries=0
    )
    assert found.age == 71


@step("PARALLEL_TOOLS")
def _() -> None:
    client = instructor.from_openai(puppet, mode=instructor.Mode.PARALLEL_TOOLS)
    calls = [call("Person", name="Ida", age=71, city="Bern"), call("Person", name="Ugo", age=9, city="Rome")]
    found = client.chat.completions.create(
        model=PUPPET, messages=[{"role": "user", "content": plan(calls)}], response_model=Iterable[Person]
    )
    assert [person.name for person in found] == ["Ida", "Ugo"]


@step("create_partial (streamed)")
def _() -> None:
    client = instructor.from_openai(demo, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(**FIELDS, response_model=Person)
    assert last.age == 71


end()
