"""Dialogues of fixed form: calls of one tool, and sentences told as JSON of one schema.

Knows nothing about other dialogues, tokens or training. Every generator takes a seeded `random.Random`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from benchmarks.demo_training import facts
from benchmarks.demo_training.phrases import casual, noise_word
from benchmarks.demo_training.skills import worded

#: one message, as chat templates take it
Message = dict[str, str]

CITIES = [city for _, city, _ in facts.ATLAS] + ["Chicago", "Munich", "Lyon", "Milan", "Mumbai", "New York", "Hamburg"]
WEATHER_TOOLS = ["get_weather", "get_weather", "weather", "get_current_weather"]
#: the name of the tool's one argument
PLACE = ["city", "city", "location"]
#: tools that the model is never to call
OTHER_TOOLS = ["search(query)", "get_time(zone)", "send_mail(to, text)", "open_page(url)", "add(a, b)", "lights()"]
SKIES = ["sunny", "cloudy", "rain", "snow", "windy", "fog", "clear", "storm"]


@dataclass(frozen=True)
class Tool:
    """The tool as a system message shows it, with whatever else is offered."""

    name: str
    place: str
    system: Message


def tools_message(tools: list[str]) -> Message:
    """What the chat template writes of the tools of a request."""
    return {"role": "system", "content": f"Tools: {' '.join(tools)}"}


def offer(rng: random.Random) -> Tool:
    name, place = rng.choice(WEATHER_TOOLS), rng.choice(PLACE)
    tools = [f"{name}({place})", *rng.sample(OTHER_TOOLS, rng.choice((0, 0, 0, 1, 2)))]
    rng.shuffle(tools)
    return Tool(name, place, tools_message(tools))


def other_tools(rng: random.Random) -> Message:
    return tools_message(rng.sample(OTHER_TOOLS, rng.choice((1, 1, 2))))


def place_name(rng: random.Random) -> str:
    """A city, or a word that cannot be known, so that it has to be copied."""
    return rng.choice(CITIES) if rng.random() < 0.6 else noise_word(rng).capitalize()


def weather_question(rng: random.Random, wording: str = "weather") -> tuple[str, str]:
    """(a question for the weather in a city, whose name keeps its spelling or loses its capitals; the city)."""
    city = place_name(rng)
    typed = city.lower() if city in CITIES and rng.random() < 0.1 else city
    return casual(rng, worded(rng, wording, k="{k}")).format(k=typed, K=typed.upper()), city


def weather_exchange(rng: random.Random, tool: Tool, asked: str, city: str) -> list[Message]:
    """A question, its call and, most times, what the tool says and the answer made of it."""
    call = json.dumps({"name": tool.name, "arguments": {tool.place: city}}, ensure_ascii=False)
    exchange = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
    ]
    if rng.random() < 0.7:
        said, told = _weather(rng)
        exchange.append({"role": "tool", "content": said})
        exchange.append({"role": "assistant", "content": f"The weather in {city}: {told}."})
    return exchange


def _weather(rng: random.Random) -> tuple[str, str]:
    """What the tool says, and the same as told to the user."""
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 40)
    if rng.random() < 0.1:
        sky = noise_word(rng)
    text = rng.choice(("{s}, {d} degrees", "{d} degrees and {s}", "{s}", "{s} at {d} °C")).format(s=sky, d=degrees)
    form = rng.random()
    if form < 0.6:
        return text, text
    if form < 0.75:
        return text + ".", text
    return json.dumps({"sky": sky, "degrees": degrees}), f"{sky}, {degrees} degrees"


def person(rng: random.Random) -> tuple[str, str]:
    """(what is told of somebody, the same as JSON of the keys name, age and city)."""
    name = rng.choice(facts.NAMES) if rng.random() < 0.7 else noise_word(rng).capitalize()
    if rng.random() < 0.2:
        name += " " + noise_word(rng).capitalize()
    age, city = rng.randint(1, 99), place_name(rng)
    told = worded(rng, "ask person", x=worded(rng, "person", n=name, a=age, k=city))
    form = {"name": name, "age": age, "city": city}
    return told, json.dumps(form, ensure_ascii=False, separators=(",", ":"))
