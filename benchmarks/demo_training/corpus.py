"""Writes the training dialogues of the demo model from hand-written text and the skills, the same for the same seed.

Knows nothing about tokens, tensors or training.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.demo_training import facts, formal, skills
from benchmarks.demo_training.formal import Message
from benchmarks.demo_training.phrases import Item, casual, held_out, noise_word, proper, read_refusals, text_items
from benchmarks.demo_training.skills import WORDINGS, worded

NAME_UNKNOWN = "You have not told me your name yet."
COLOURS = ["red", "blue", "green", "yellow", "purple", "brown", "black", "white", "orange", "grey", "pink"]
PASTIMES = [
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
    "cats",
    "dogs",
    "horses",
    "rain",
    "snow",
    "summer",
]
CITIES = [city for _, city, _ in facts.ATLAS if " " not in city] + ["Chicago", "Munich", "Lyon", "Milan", "Mumbai"]
#: what users tell about themselves: statement, reply, question, answer ({v} is the value), and the values
PERSONAL: list[tuple[str, str, str, str, list[str]]] = [
    (
        "my favourite colour is",
        "{V} is a nice colour.",
        "what is my favourite colour",
        "Your favourite colour is",
        COLOURS,
    ),
    ("my favorite color is", "{V} is a nice colour.", "what is my favorite color", "Your favourite colour is", COLOURS),
    ("i live in", "I hope that you like it in {v}.", "where do i live", "You live in", CITIES),
    ("i come from", "I hope that you like it in {v}.", "where do i come from", "You come from", CITIES),
    ("my age is", "{v} is a good age.", "how old am i", "Your age is", [str(n) for n in range(5, 100)]),
    ("my dog is called", "{V} is a good name for a dog.", "what is my dog called", "Your dog is called", facts.NAMES),
    ("my cat is called", "{V} is a good name for a cat.", "what is my cat called", "Your cat is called", facts.NAMES),
    ("i like", "It is good to like {v}.", "what do i like", "You like", PASTIMES),
]


class HeldOut(NamedTuple):
    """A conversation whose answers were not trained on."""

    category: str
    messages: list[Message]


class Corpus:
    """A seeded source of dialogues. Held-out wordings never occur in `dialogues`; `tests` returns only them."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.texts = {name: text_items(name) for name in ("terms", "usage", "talk", "verses")}
        self.texts["questions"] = [item for item in self.texts["terms"] if item.follow_up is None]
        self.first_wordings = {e.question for items in self.texts.values() for e in _first(items)}
        self.slots, self.groups = read_refusals()

    def refusal(self) -> Item:
        name, templates, answer = self.rng.choices(self.groups, (10, 4, 4, 2, 1.5))[0]
        question = self.rng.choice(templates)
        while "{" in question:
            slot = question[question.index("{") + 1 : question.index("}")]
            value = noise_word(self.rng) if slot == "noise" else self.rng.choice(self.slots[slot])
            if slot in ("thing", "person") and self.rng.random() < 0.08:
                value = noise_word(self.rng)
            question = question.replace("{" + slot + "}", value, 1)
        return Item("refuse " + name, question, answer, "Unknown.")

    def item(self) -> Item:
        """Any exchange at all, held out or not."""
        shares = {"skill": 66, "terms": 8, "questions": 5, "usage": 10, "talk": 10, "verses": 1.2, "refusal": 13}
        kind = self.rng.choices(list(shares), list(shares.values()))[0]
        if kind == "skill":
            return self.rng.choices(list(skills.SKILLS), list(skills.SKILLS.values()))[0](self.rng)
        return self.refusal() if kind == "refusal" else self.rng.choice(self.texts[kind])

    def reserved(self, item: Item) -> bool:
        """Whether the wording belongs to the test; the plainest wordings of the text files never do."""
        return held_out(item.question) and item.question not in self.first_wordings

    def training_item(self) -> Item:
        while self.reserved(item := self.item()):
            pass
        return item

    def ask(self, item: Item) -> str:
        return casual(self.rng, item.question) if item.casual else item.question

    def exchange(self) -> list[tuple[str, str]]:
        """One question and its answer, now and then with follow-ups of the same kind."""
        item = self.training_item()
        turns = [(self.ask(item), item.answer)]
        if item.category == "count" and item.follow_up and self.rng.random() < 0.2:
            turns.append((casual(self.rng, item.follow_up), ", ".join(reversed(item.answer[:-1].split(", "))) + "."))
        elif item.follow_up and item.category != "count" and self.rng.random() < 0.3:
            for _ in range(self.rng.randint(1, 3)):
                turns += self.follow_up(item.category)
        if self.rng.random() < 0.02:
            turns.append((casual(self.rng, worded(self.rng, "again")), turns[-1][1]))
        return turns

    def follow_up(self, category: str) -> list[tuple[str, str]]:
        """A short question that is understood only after one of the same category."""
        for _ in range(40):
            if category == "terms":
                item = self.rng.choice(self.texts["terms"])
            else:
                item = self.rng.choices(list(skills.SKILLS), list(skills.SKILLS.values()))[0](self.rng)
            if item.follow_up and (item.category == category or {item.category, category} == {"capital", "unknown"}):
                return [(casual(self.rng, item.follow_up), item.answer)]
        return []

    def memory(self) -> list[tuple[str, str]]:
        """The user tells something, talks of other things, and asks for it; or asks without having told."""
        rng = self.rng
        if rng.random() < 0.5:
            name = rng.choice(facts.NAMES) if rng.random() < 0.6 else noise_word(rng).capitalize()
            told, reply = self.introduce(name)
            question, answer, unknown = worded(rng, "ask name"), f"Your name is {name}.", NAME_UNKNOWN
        else:
            say, reply, question, answer, values = rng.choice(PERSONAL)
            value = rng.choice(values)
            told = f"{say} {value}" if rng.random() < 0.5 else proper(f"{say} {value}")
            reply, answer = reply.format(v=value, V=value[0].upper() + value[1:]), f"{answer} {value}."
            unknown = "You have not told me that yet."
        if rng.random() < 0.2:
            return [*self.chat(rng.randint(0, 2)), (casual(rng, question), unknown)]
        return [(told, reply), *self.chat(rng.choice((0, 0, 1, 1, 2, 3))), (casual(rng, question), answer)]

    def introduce(self, name: str) -> tuple[str, str]:
        name_as_typed = name.lower() if self.rng.random() < 0.15 else name
        told = worded(self.rng, "my name", n=name_as_typed)
        if self.rng.random() < 0.12:
            told += self.rng.choice((" what is your name?", ", and you?", " who are you?"))
            return told, f"Nice to meet you, {name}. My name is tidemill-demo."
        return told, f"Nice to meet you, {name}. How can I help you?"

    def chain(self) -> list[tuple[str, str]]:
        """A sum and further terms for its result: "plus 3"."""
        total = self.rng.randint(0, 10)
        add = self.rng.randint(0, 10)
        turns = [(casual(self.rng, f"what is {total} + {add}"), f"{total} + {add} = {total + add}.")]
        total += add
        for _ in range(self.rng.randint(1, 3)):
            step = self.rng.randint(0, 20)
            if total > 20:
                break
            minus = total >= step and self.rng.random() < 0.4
            sign, after = ("-", total - step) if minus else ("+", total + step)
            asked = casual(self.rng, worded(self.rng, "minus" if minus else "plus", s=step))
            turns.append((asked, f"{total} {sign} {step} = {after}."))
            total = after
        return turns

    def chat(self, exchanges: int) -> list[tuple[str, str]]:
        return [turn for _ in range(exchanges) for turn in self.exchange()]

    def one_word(self) -> list[Message]:
        """A system message that asks for one word, and questions that have an answer of one word."""
        turns: list[tuple[str, str]] = []
        while len(turns) < self.rng.randint(1, 4):
            item = self.training_item()
            if item.short and item.category != "repeat":
                turns.append((self.ask(item), item.short))
        return messages(turns, worded(self.rng, "one word"))

    def weather(self, reserved: bool = False) -> list[Message]:
        """Questions for the one tool; with ``reserved`` the first of them is held out, and nothing else follows."""
        rng, tool = self.rng, formal.offer(self.rng)
        while held_out((turn := formal.weather_question(rng))[0]) != reserved:
            pass
        asked, city = turn
        dialogue = [tool.system, *formal.weather_exchange(rng, tool, asked, city)]
        if not reserved and dialogue[-1]["content"].startswith("The weather") and rng.random() < 0.3:
            dialogue += formal.weather_exchange(rng, tool, *formal.weather_question(rng, "and weather"))
        return dialogue

    def untouched(self) -> list[Message]:
        """Tools are offered, and none of them helps."""
        rng = self.rng
        live = next(answer for name, _, answer in self.groups if name == "live")
        if rng.random() < 0.6:
            while (turns := self.chat(1))[0][1] == live:  # it may be of the weather
                pass
            return [formal.offer(rng).system, *messages(turns, self.system())]
        turns = [(formal.weather_question(rng)[0], live)] if rng.random() < 0.5 else self.chat(1)
        return [formal.other_tools(rng), *messages(turns, self.system())]

    def form(self, reserved: bool = False) -> list[Message]:
        """A sentence about somebody, to be told as JSON."""
        while held_out((turn := formal.person(self.rng))[0]) != reserved:
            pass
        return messages([turn], self.system() if self.rng.random() < 0.3 else None)

    def of_fixed_form(self) -> list[Message]:
        return self.rng.choices((self.weather, self.untouched, self.form), (5, 2, 4))[0]()

    def system(self) -> str | None:
        luck = self.rng.random()
        if luck < 0.55:
            return None
        if luck < 0.98:
            return " ".join(self.rng.sample(WORDINGS["system"], self.rng.choice((1, 1, 1, 2))))
        return " ".join(proper(skills.sentence(self.rng)) for _ in range(self.rng.randint(2, 16)))

    def dialogue(self, exchanges: int | None = None) -> list[Message]:
        """One conversation; ``exchanges`` None draws a short one."""
        luck = self.rng.random()
        if exchanges is None and luck < 0.04:
            return self.one_word()
        if exchanges is None and luck > 0.85:
            return self.of_fixed_form()
        turns = self.chat(exchanges or self.rng.choice((1, 1, 1, 1, 2, 2, 3)))
        if exchanges or luck < 0.12:
            at = self.rng.randint(0, len(turns))
            turns[at:at] = self.memory()
        elif luck < 0.15:
            turns += self.chain()
        elif luck < 0.16:
            question, answer = turns[0]
            preface = " ".join(proper(skills.sentence(self.rng)) for _ in range(self.rng.randint(1, 12)))
            turns = [(f"{preface} {proper(question) if question[0].islower() else question}", answer)]
        return messages(turns, self.system())

    def dialogues(self) -> Iterator[list[Message]]:
        """Training conversations without end; about one in a hundred is long."""
        while True:
            yield self.dialogue(self.rng.randint(8, 40) if self.rng.random() < 0.008 else None)

    def tests(self, number: int) -> list[HeldOut]:
        """``number`` held-out questions in careful or casual spelling, no question twice."""
        found: dict[str, HeldOut] = {}
        while len(found) < number:
            if self.reserved(item := self.item()):
                asked = self.ask(item)
                found.setdefault(asked, HeldOut(item.category, messages([(asked, item.answer)])))
        return list(found.values())

    def tests_of_fixed_form(self, number: int) -> list[HeldOut]:
        """``number`` held-out questions for the tool, and as many sentences to be told as JSON."""
        calls = [HeldOut("tool", self.weather(reserved=True)) for _ in range(number)]
        return calls + [HeldOut("json", self.form(reserved=True)) for _ in range(number)]


def _first(items: list[Item], number: int = 3) -> list[Item]:
    """The first wordings of every answer."""
    seen: Counter[str] = Counter()
    first = []
    for item in items:
        seen[item.answer] += 1
        if seen[item.answer] <= number:
            first.append(item)
    return first


def messages(turns: list[tuple[str, str]], system: str | None = None) -> list[Message]:
    """The turns as chat messages."""
    head = [{"role": "system", "content": system}] if system else []
    for user, model in turns:
        head += [{"role": "user", "content": user}, {"role": "assistant", "content": model}]
    return head
