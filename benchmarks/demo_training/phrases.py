"""Reads the hand-written text files and makes the casual spellings in which users really type.

Knows nothing about dialogues, tokens or training.
"""
# ruff: noqa: SIM905 - a table of wordings is easier to read and to extend as one text

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

TEXT = Path(__file__).parent / "text"
#: one question in this many is kept out of the training text and used as a test
HOLD_OUT = 20

TERM_QUESTIONS = (
    "what is {x}|what does {x} mean|{x}|what's {x}|explain {x}|define {x}|tell me about {x}|can you explain {x}|"
    "what do you mean by {x}|what is meant by {x}|i do not understand {x}|give me a definition of {x}|describe {x}|"
    "what is {x} in tidemill|what is the meaning of {x}|how does {x} work|what do you know about {x}|"
    "please explain {x}|could you tell me what {x} is|why does {x} matter|{x} meaning|what are {x}|who or what is {x}"
).split("|")

_GREETINGS = ("hey, ", "hi, ", "hello, ", "please ", "um, ", "ok, ", "so ", "hi! ", "hello! ", "now ", "well, ", "and ")
_ENDINGS = (" please", ", please", " thanks", " ?", "??", "!", ".", "?", "...", " pls", " please?")
_QUESTION = re.compile(
    r"^(what|which|who|where|when|why|how|is|are|can|do|does|could|will|would|should|did)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Item:
    """One exchange: what the user asks, what the model answers, and the answer in one word where there is one."""

    category: str
    question: str
    answer: str
    short: str | None = None
    #: another wording of the question that is enough after a question of the same category ("and Italy")
    follow_up: str | None = None
    #: False where the exact characters of the question matter
    casual: bool = True


def held_out(question: str) -> bool:
    """Whether this wording is reserved for the test, decided by the text alone so that every seed agrees."""
    return crc32(question.lower().encode()) % HOLD_OUT == 0


def read_entries(name: str) -> list[tuple[list[str], list[str], str]]:
    """Read ``text/<name>.txt``: a list of (term aliases, questions, answer); "# " lines are remarks."""
    entries: list[tuple[list[str], list[str], str]] = []
    aliases: list[str] = []
    questions: list[str] = []
    answer: list[str] = []

    def close() -> None:
        if answer:
            entries.append((aliases[:], questions[:], "\n".join(answer).rstrip()))
            for part in (aliases, questions, answer):
                part.clear()

    for line in (TEXT / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(("@ ", "? ")):
            close()
            (aliases if line[0] == "@" else questions).extend(part.strip() for part in line[2:].split("|"))
        elif line.startswith("- ") or (answer and not line.startswith("#")):
            answer.append(line[2:])
    close()
    return entries


def read_refusals() -> tuple[dict[str, list[str]], list[tuple[str, list[str], str]]]:
    """Read ``text/refusals.txt``: the slots, and groups of (name, question templates, answer)."""
    slots: dict[str, list[str]] = {}
    groups: list[tuple[str, list[str], str]] = []
    for line in (TEXT / "refusals.txt").read_text(encoding="utf-8").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "=":
            name, _, values = rest.partition(": ")
            slots[name] = [value.strip() for value in values.split(";")]
        elif mark == "!":
            groups.append((rest, [], ""))
        elif mark == "-":
            groups[-1] = (groups[-1][0], groups[-1][1], rest)
        elif mark == "?":
            groups[-1][1].extend(part.strip() for part in rest.split("|"))
    return slots, groups


def read_wordings() -> dict[str, list[str]]:
    """Read ``text/wordings.txt``: for each skill the ways to ask for it."""
    wordings: dict[str, list[str]] = {}
    for line in (TEXT / "wordings.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition(" = ")
            wordings.setdefault(name, []).extend(part.strip() for part in rest.split(" | "))
    return wordings


def text_items(name: str) -> list[Item]:
    """Every question of one text file, in its plain form."""
    items = []
    for aliases, questions, answer in read_entries(name):
        for alias in aliases:
            ask = [(t.format(x=alias), f"and {alias}") for t in TERM_QUESTIONS]
            items += [Item(name, question, answer, None, follow_up) for question, follow_up in ask]
        items += [Item(name, question, answer) for question in questions]
    return items


def noise_word(rng: random.Random, low: int = 2, high: int = 4) -> str:
    """A word that means nothing but can be spoken, such as "dorimel"."""
    syllable = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(low, high)))
    return "".join(syllable)[: rng.randint(3, 9)] + rng.choice(("", "", "n", "r", "s", "l", "x"))


def _typo(rng: random.Random, text: str) -> str:
    """Drop, double or swap one letter of a longer word."""
    places = [m.start() for m in re.finditer(r"[a-z](?=[a-z]{3})", text)]
    if not places:
        return text
    at = rng.choice(places) + 1
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def proper(question: str) -> str:
    """The careful spelling: a capital first, "I", and the right mark at the end."""
    text = re.sub(r"\bi\b", "I", question)
    text = text[:1].upper() + text[1:] if not text.startswith("--") else text
    return text + ("?" if _QUESTION.match(question) else "" if text[-1:] in ".!?=-" else ".")


def casual(rng: random.Random, question: str) -> str:
    """One of the many ways in which a user may type ``question``."""
    luck = rng.random()
    if luck < 0.3:
        return proper(question)
    text = question
    if rng.random() < 0.14:
        text = rng.choice(_GREETINGS) + text
    if rng.random() < 0.05:
        text = _typo(rng, text)
    if rng.random() < 0.3:
        text = text.replace("'", "").replace("do not", "dont").replace("what is", rng.choice(("whats", "what's")))
    if luck < 0.5:
        text = proper(text)[: -1 if text[-1:] not in ".!?=" and rng.random() < 0.4 else None]
    elif rng.random() < 0.3:
        text += "?" if _QUESTION.match(question) else rng.choice(_ENDINGS)
    if rng.random() < 0.1:
        text = text.rstrip("?.!") + rng.choice(_ENDINGS)
    if luck > 0.98:
        return text.upper()
    return text.lower() if luck > 0.75 else text
