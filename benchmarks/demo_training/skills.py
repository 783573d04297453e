"""The things the demo model can do: one generator of `Item` per skill, from the tables of `facts`.

Knows nothing about dialogues, tokens or training. Every generator takes a seeded `random.Random` and returns one item.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.demo_training import facts
from benchmarks.demo_training.phrases import Item, noise_word, read_wordings

WORDINGS = read_wordings()
UNKNOWN_CAPITAL = "I do not know that capital. I know more than seventy of them, but not this one."
TOO_LARGE = "That is too large for me. I can add and subtract numbers up to twenty."
TOO_FAR = "That is too far for me. I can count up to thirty."
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}


def worded(rng: random.Random, name: str, **values: object) -> str:
    """One wording of the skill ``name`` with its slots filled."""
    return rng.choice(WORDINGS[name]).format(**values)


def _country(rng: random.Random) -> tuple[str, str, str, str]:
    """(name as asked, proper name, capital, continent)."""
    country, capital, continent = rng.choice(facts.ATLAS)
    asked = rng.choice([country, *facts.NICKNAMES.get(country, [])])
    return asked, country, capital, continent


def capital(rng: random.Random) -> Item:
    asked, country, city, _ = _country(rng)
    follow_up = worded(rng, "and capital", c=asked)
    return Item(
        "capital", worded(rng, "capital", c=asked), f"The capital of {country} is {city}.", f"{city}.", follow_up
    )


def unknown_capital(rng: random.Random) -> Item:
    asked = rng.choice(facts.ELSEWHERE) if rng.random() < 0.7 else noise_word(rng).capitalize()
    follow_up = worded(rng, "and capital", c=asked)
    return Item("unknown", worded(rng, "capital", c=asked), UNKNOWN_CAPITAL, "Unknown.", follow_up)


def country_of(rng: random.Random) -> Item:
    country, city, _ = rng.choice(facts.ATLAS)
    if city == "London":
        country = "England and of the United Kingdom"
    follow_up = worded(rng, "and country", k=city)
    return Item("country", worded(rng, "country", k=city), f"{city} is the capital of {country}.", None, follow_up)


def where(rng: random.Random) -> Item:
    asked, country, city, continent = _country(rng)
    name = country[0].upper() + country[1:]
    if rng.random() < 0.5:
        verb = "are" if country in ("the United States", "the Netherlands", "the Philippines") else "is"
        return Item("where", worded(rng, "where country", c=asked), f"{name} {verb} in {continent}.", f"{continent}.")
    country = "England" if city == "London" else country
    return Item("where", worded(rng, "where city", k=city), f"{city} is in {country}.")


def is_capital(rng: random.Random) -> Item:
    asked, country, city, _ = _country(rng)
    other = city if rng.random() < 0.5 else rng.choice(facts.ATLAS)[1]
    if rng.random() < 0.3:
        home = next(c for c, k, _ in facts.ATLAS if k == other)
        home = "England" if other == "London" else home
        yes = other == city
        answer = f"{'Yes' if yes else 'No'}, {other} is in {home}."
        return Item("yes/no", worded(rng, "in country", k=other, c=asked), answer, "Yes." if yes else "No.")
    question = worded(rng, "is capital", k=other, c=asked)
    if other == city:
        return Item("yes/no", question, f"Yes, {city} is the capital of {country}.", "Yes.")
    return Item("yes/no", question, f"No, the capital of {country} is {city}.", "No.")


def arithmetic(rng: random.Random) -> Item:
    kind = rng.choices(("+", "-", "*"), (6, 4, 2))[0]
    most = 10 if kind == "*" else 20
    a, b = rng.randint(0, most), rng.randint(0, most)
    if kind == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[kind]
    words = rng.random() < 0.12
    left, right = (facts.NUMBER_WORDS[n] if words else str(n) for n in (a, b))
    sign = SPOKEN[kind] if words or rng.random() < 0.3 else rng.choice("*x") if kind == "*" else kind
    term = f"{left} {sign} {right}" if sign.isalpha() or rng.random() < 0.6 else f"{left}{sign}{right}"
    style = f"sum {kind}" if rng.random() < 0.25 else "sum"
    question = worded(rng, style, t=term, l=left, r=right)
    return Item("sums", question, f"{a} {kind} {b} = {result}.", f"{result}.", f"and {term}")


def too_large(rng: random.Random) -> Item:
    a, b = rng.randint(21, 10 ** rng.randint(2, 5)), rng.randint(21, 10 ** rng.randint(2, 4))
    if rng.random() < 0.3:
        b = rng.randint(0, 20)
    sign = rng.choice(("+", "-", "plus", "minus", "*", "/", "times", "divided by"))
    term = f"{a} {sign} {b}" if len(sign) > 1 or rng.random() < 0.6 else f"{a}{sign}{b}"
    return Item("too large", worded(rng, "too large", t=term, a=a, b=b), TOO_LARGE, "Unknown.")


def _row(numbers: range) -> str:
    return ", ".join(map(str, numbers)) + "."


def count(rng: random.Random) -> Item:
    low, high = sorted((rng.choice((0, 1, 1, 1, rng.randint(0, 25))), rng.randint(2, 30)))
    high = max(high, low + 2)
    first, last = (facts.NUMBER_WORDS[n] if n <= 20 and rng.random() < 0.25 else str(n) for n in (low, high))
    one = "one " if low == 1 and rng.random() < 0.6 else ""
    if rng.random() < 0.4:
        question = worded(rng, f"count {one}down", a=first, b=last)
        return Item("count", question, _row(range(high, low - 1, -1)), None, "and forwards")
    question = worded(rng, f"count {one}up", a=first, b=last)
    return Item("count", question, _row(range(low, high + 1)), None, "and backwards")


def count_more(rng: random.Random) -> Item:
    kind, high = rng.choice(("far", "far", "twos", "odd")), 2 * rng.randint(3, 15)
    if kind == "far":
        high = rng.choice((50, 60, 99, 100, 200, 500, 1000, 10000, 1000000, rng.randint(32, 999)))
        return Item("count", worded(rng, "count far", b=high), TOO_FAR)
    return Item("count", worded(rng, f"count {kind}", b=high), _row(range(2 if kind == "twos" else 1, high + 1, 2)))


def neighbour(rng: random.Random) -> Item:
    numbers = [str(n) for n in range(31)]
    rows = {"day": facts.DAYS, "month": facts.MONTHS, "letter": facts.LETTERS, "number": numbers}
    kind, row = rng.choice(list(rows.items()))
    after, at = rng.random() < 0.6, rng.randrange(len(row))
    if kind in ("letter", "number"):
        at = min(at, len(row) - 2) if after else max(at, 1)
    other, word = row[(at + (1 if after else -1)) % len(row)], "after" if after else "before"
    question = worded(rng, "neighbour", w=word, x=row[at], k=kind)
    if kind == "day" and rng.random() < 0.3:
        question = worded(rng, "tomorrow" if after else "yesterday", x=row[at])
    return Item("neighbour", question, f"{other} comes {word} {row[at]}.", f"{other}.")


def compare(rng: random.Random) -> Item:
    a, b = rng.sample(range(21), 2)
    if rng.random() < 0.3:
        kind = rng.choice(("even", "odd"))
        yes = (a % 2 == 0) == (kind == "even")
        answer = f"{'Yes' if yes else 'No'}, {a} is {'even' if a % 2 == 0 else 'odd'}."
        return Item("compare", worded(rng, "even", a=a, k=kind), answer, "Yes." if yes else "No.")
    big = rng.random() < 0.6
    word = rng.choice(("bigger", "larger", "greater") if big else ("smaller", "less"))
    best = max(a, b) if big else min(a, b)
    answer = f"{best} is {word} than {a + b - best}."
    if rng.random() < 0.25:
        verdict = "Yes" if best == a else "No"
        return Item("compare", worded(rng, "compare yes", w=word, a=a, b=b), f"{verdict}, {answer}", f"{verdict}.")
    return Item("compare", worded(rng, "compare", w=word, a=a, b=b), answer, f"{best}.")


def opposite(rng: random.Random) -> Item:
    a, b = rng.choice(facts.OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    follow_up = worded(rng, "and opposite", a=a)
    answer = f"The opposite of {a} is {b}."
    return Item("opposite", worded(rng, "opposite", a=a), answer, f"{b.capitalize()}.", follow_up)


def _word(rng: random.Random) -> str:
    kinds = (facts.WORDS, facts.WORDS, facts.NAMES, rng.choice(facts.OPPOSITES))
    return rng.choice(rng.choice(kinds))


def spell(rng: random.Random) -> Item:
    word = _word(rng)
    luck = rng.random()
    if luck < 0.12:
        answer = f"The word {word} has {len(word)} letters."
        return Item("spell", worded(rng, "letters", x=word), answer, f"{len(word)}.")
    if luck < 0.2:
        which = rng.choice(("first", "last"))
        letter = (word[0] if which == "first" else word[-1]).upper()
        answer = f"The {which} letter of {word} is {letter}."
        return Item("spell", f"what is the {which} letter of {word}", answer, f"{letter}.")
    follow_up, plain = worded(rng, "and spell", x=word), rng.random() < 0.5
    return Item("spell", worded(rng, "spell", x=word), "-".join(word.upper()) + ".", None, follow_up, plain)


def sentence(rng: random.Random) -> str:
    """A short plain sentence without its final stop."""
    parts = (rng.choice(facts.SENTENCE_PARTS[kind]) for kind in ("who", "does", "what", "how"))
    return " ".join(part for part in parts if part)


def echo(rng: random.Random) -> Item:
    luck = rng.random()
    if luck < 0.4:
        text = sentence(rng)
    elif luck < 0.65:
        text = " ".join(_word(rng) for _ in range(rng.randint(1, 5)))
    elif luck < 0.8:
        text = " ".join(noise_word(rng) for _ in range(rng.randint(1, 4)))
    elif luck < 0.9:
        text = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(2, 6)))
    else:
        text = rng.choice(("hello world", "good morning", "i love the sea", "one two three", "abc", "testing testing"))
    if rng.random() < 0.35:
        text = text[0].upper() + text[1:] + rng.choice(("", ".", "!"))
    question = worded(rng, "repeat", x=text)
    # the same characters stand before and in the phrase as in the question: copying can follow them token by token
    quote = '"' if question.endswith('"') else ""
    return Item("repeat", question, f"As you wish: {quote}{text}{quote}", None, None, False)


#: skill -> how often it is drawn
SKILLS: dict[Callable[[random.Random], Item], float] = {
    capital: 7,
    unknown_capital: 2,
    country_of: 4,
    where: 4,
    is_capital: 4,
    arithmetic: 16,
    too_large: 1.5,
    count: 8,
    count_more: 1,
    neighbour: 5,
    compare: 4,
    opposite: 4,
    spell: 8,
    echo: 9,
}
