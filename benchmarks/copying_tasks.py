"""Tasks whose answers use the words of the prompt, such as quotes, renamed code and records as JSON; plain questions.

Every generator takes a seeded `random.Random`. A task returns a question and its answer.
"""

import json
import random
from collections.abc import Callable

Task = Callable[[random.Random], tuple[str, str]]

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Hugo", "Ida", "Jonas", "Lena", "Max", "Nina", "Oscar", "Paul",
    "Rosa", "Sam", "Uma", "Vera", "Will", "Zoe",
)  # fmt: skip
CITIES = (
    "Paris", "Berlin", "Rome", "Madrid", "Lisbon", "Oslo", "Athens", "Vienna", "Cairo", "Tokyo", "Ottawa", "Lima",
    "Chicago", "Munich", "Lyon",
)  # fmt: skip
COUNTRIES = ("France", "Germany", "Italy", "Spain", "Portugal", "Norway", "Greece", "Austria", "Egypt", "Japan", "Peru")
PASTIMES = (
    "tea",
    "coffee",
    "music",
    "bread",
    "cheese",
    "books",
    "chess",
    "football",
    "trains",
    "boats",
    "rain",
    "snow",
)
THINGS = (
    "lamp",
    "book",
    "letter",
    "key",
    "clock",
    "pencil",
    "bottle",
    "basket",
    "button",
    "hammer",
    "candle",
    "mirror",
)

SENTENCES = (
    "{n} lives in {c} and likes {p}.",
    "In {c} {n} met {m} and spoke about {p}.",
    "The {w} of {n} costs {d} and comes from {c}.",
    "{n} sent {d} letters to {m} in {c}.",
    "No person in {c} knows the {w} of {m}.",
    "After {d} days {n} sold the {w} to {m}.",
)
CODE = (
    "{a} = {b} + {d}",
    "if {a} > {b}: {a} = {d}",
    "{b} = {f}({a}, {d})",
    "for {a} in {f}({b}): print({a})",
    "print({a}, {b})",
    "{a} = {b} * {d} - {a}",
)
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is tidemill?",
    "What does TTFT mean?",
    "How do I start the server?",
    "Write a poem about the tide",
    "Who invented the telephone?",
    "What is the capital of {country}?",
    "What is {few} + {more}?",
    "Count from {few} to {more}.",
    "Spell {thing}",
    "Say: the {thing} is in {city}",
)


def noise_word(rng: random.Random) -> str:
    """Return a word without a meaning that can be spoken, such as "dorimel"."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
    return "".join(syllables)[: rng.randint(3, 9)] + rng.choice(("", "", "n", "r", "s", "l", "x"))


def question(rng: random.Random) -> str:
    """Return a question without a text, as the packaged model was trained to answer them."""
    few = rng.randint(1, 9)
    words = {"country": rng.choice(COUNTRIES), "thing": rng.choice(THINGS), "city": rng.choice(CITIES)}
    return rng.choice(QUESTIONS).format(**words, few=few, more=few + rng.randint(1, 9))


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else noise_word(rng).capitalize()


def _sentences(rng: random.Random, low: int, high: int) -> list[str]:
    """Sentences about a few persons, so that a sentence is not known by its first word."""
    names = [_name(rng) for _ in range(5)]
    found = []
    for _ in range(rng.randint(low, high)):
        first, second = rng.sample(names, 2)
        values = {"n": first, "m": second, "c": rng.choice(CITIES), "p": rng.choice(PASTIMES)}
        found.append(rng.choice(SENTENCES).format(**values, w=noise_word(rng), d=rng.randint(2, 999)))
    return found


def quote(rng: random.Random) -> tuple[str, str]:
    """Repeat a text."""
    text = " ".join(_sentences(rng, 3, 12))
    return f"Quote this text: {text}", text


def extract(rng: random.Random) -> tuple[str, str]:
    """Repeat the sentences from one to another one."""
    lines = _sentences(rng, 5, 14)
    first = rng.randrange(len(lines) - 2)
    last = rng.randint(first + 1, min(first + 5, len(lines) - 1))
    text = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    answer = "\n".join(f"{number}. {line}" for number, line in enumerate(lines[first : last + 1], first + 1))
    return f"Give lines {first + 1} to {last + 1}:\n{text}", answer


def rewrite(rng: random.Random) -> tuple[str, str]:
    """Repeat a text with one name replaced."""
    text = " ".join(_sentences(rng, 3, 10))
    old = rng.choice([word for word in text.split() if word.isalpha() and word[0].isupper()])
    new = _name(rng)
    return f"Write {new} for {old}: {text}", " ".join(new if word == old else word for word in text.split())


def rename(rng: random.Random) -> tuple[str, str]:
    """Repeat code with one variable renamed."""
    names = [noise_word(rng) for _ in range(4)]
    calls = [noise_word(rng) for _ in range(2)]
    lines = []
    for _ in range(rng.randint(4, 14)):
        first, second = rng.sample(names, 2)
        lines.append(rng.choice(CODE).format(a=first, b=second, f=rng.choice(calls), d=rng.randint(2, 99)))
    old, new = names[0], noise_word(rng)
    code = "\n".join(lines)
    return f"Rename {old} to {new}:\n{code}", code.replace(old, new)


def records(rng: random.Random) -> tuple[str, str]:
    """Tell sentences about persons as JSON."""
    told, found = [], []
    for _ in range(rng.randint(2, 7)):
        record = {"name": _name(rng), "age": rng.randint(1, 99), "city": rng.choice(CITIES)}
        told.append("{name} is {age} and lives in {city}.".format(**record))
        found.append(json.dumps(record))
    return f"As JSON lines: {' '.join(told)}", "\n".join(found)


def ticket(rng: random.Random) -> tuple[str, str]:
    """Fill a form from a message: the answers of a batch of such lines repeat each other."""
    name, city, days = _name(rng), rng.choice(CITIES), rng.randint(2, 30)
    lost, colour = rng.choice(THINGS), rng.choice(("red", "blue", "green", "white"))
    asked = f"Ticket: {name} from {city} lost a {colour} {lost} {days} days ago."
    answer = {"category": "lost property", "customer": name, "city": city, "item": lost, "colour": colour, "days": days}
    rest = {"urgent": days < 7, "department": "customer service", "reply": f"Dear {name}, we look for your {lost}."}
    return asked, json.dumps({**answer, **rest})


GROUNDED: dict[str, Task] = {
    "quote": quote, "extract": extract, "rewrite": rewrite, "rename": rename, "records": records,
}  # fmt: skip
