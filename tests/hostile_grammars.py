"""Grammars that cost more than they weigh, by name: deep, doubling, blank, large, wrong."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from engine.forms import Grammar, GrammarKind


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value))


def lark(text: str) -> Grammar:
    return Grammar("grammar", text)


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def definitions(count: int, link: Callable[[dict[str, str]], Any]) -> Grammar:
    """A chain of definitions, each of which refers to the next one."""
    chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return schema({"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def rules(count: int, first: str, rule: str, last: str) -> Grammar:
    return lark(first + "".join(rule.format(i, i + 1) for i in range(count)) + last.format(count))


def chains() -> Iterator[tuple[str, Grammar]]:
    """References as deep as 256 KiB allow; each ended a process with a stack of 8 MiB."""
    yield "anyOf of references", definitions(3900, lambda to: {"anyOf": [to, {"type": "null"}]})
    yield "references", definitions(7200, lambda to: to)
    yield "items of references", definitions(4000, lambda to: {"type": "array", "items": to})
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    yield "properties of references", definitions(2000, lambda to: {**closed, "properties": {"a": to}})
    yield "rules", rules(18000, "start: r0\n", "r{}: r{}\n", 'r{}: "a"\n')
    yield "terminals", rules(18000, "start: T0\n", "T{}: T{}\n", 'T{}: "a"\n')
    yield "GBNF rules", rules(4000, "root ::= a0\n", "a{} ::= a{}\n", 'a{} ::= "x"\n')


def doublings() -> Iterator[tuple[str, Grammar]]:
    """Each further line or level doubles the work."""
    yield "doubling terminals", rules(40, "start: T0\n", "T{0}: T{1} T{1}\n", 'T{}: "a"\n')
    yield "doubling repeats", regex("(" * 30 + "a" + "){2}" * 30)
    yield "doubling pattern", schema({"type": "string", "pattern": "^" + "(" * 30 + "a" + "){2}" * 30 + "$"})
    yield "multiples of a prime", schema({"type": "integer", "multipleOf": 99999989})
    yield "new lines", lark("\n" * 200_000)
    for combine in ("allOf", "anyOf"):
        links: Callable[[dict[str, str]], Any] = lambda to, combine=combine: {combine: [to, to]}  # noqa: E731
        yield f"{combine} of equal references", definitions(30, links)


def nested(opening: str, middle: str, closing: str, depth: int) -> str:
    return opening * depth + middle + closing * depth


INTERSECTIONS = " & ".join(f"/[a-z]*{chr(97 + i % 26)}[a-z]{{{i}}}/" for i in range(200))
MANY_TERMINALS = f"start: {' | '.join(f'T{i}' for i in range(6000))}\n" + "".join(
    f"T{i}: /a{i}[a-z]*/\n" for i in range(6000)
)
TEXTS: dict[str, tuple[GrammarKind, str]] = {
    "parentheses": ("grammar", "start: " + nested("(", '"a"', ")", 60_000)),
    "parentheses left open": ("grammar", "start: " + "(" * 120_000),
    "brackets": ("grammar", "start: " + nested("[", '"a"', "]", 60_000)),
    "a slash": ("grammar", 'start: / "test"\n'),
    "a slash in Lark": ("lark", "start: /é"),
    "a quote": ("grammar", 'start: "abc'),
    "no rule": ("grammar", "start:"),
    "a percent sign": ("grammar", "start: %"),
    "left recursion": ("grammar", 'start: start "a" | "a"'),
    "only itself": ("grammar", "start: start"),
    "a terminal of itself": ("grammar", 'start: A\nA: A "x" | "y"'),
    "tildes": ("grammar", "start: A\nA: " + "~" * 20_000 + '"a"'),
    "intersections": ("grammar", "start: A\nA: " + INTERSECTIONS),
    "6,000 terminals": ("grammar", MANY_TERMINALS),
    "a million times": ("grammar", 'start: "a"{1,1000000}'),
    "nested repeats": ("grammar", 'start: (("a"{1,1000}){1,1000}){1,1000}'),
    "deep JSON in Lark": ("grammar", "start: %json " + nested('{"type":"array","items":', "{}", "}", 3000)),
    "a long substring": ("grammar", 'start: A\nA: %regex {"substring_chars": "' + "ab" * 50_000 + '"}'),
    "long words": ("grammar", 'start: A\nA: %regex {"substring_words": "' + "ab " * 40_000 + '"}'),
    "a special token": ("grammar", 'start: <|im_end|> "a"'),
    "a range of tokens": ("grammar", "start: <[0-100000000]>"),
    "an unknown grammar": ("grammar", "start: @sub"),
    "GBNF parentheses": ("grammar", "root ::= " + nested("(", '"a"', ")", 60_000)),
    "GBNF alternatives": ("grammar", "root ::= " + " | ".join(f'"a{i}"' for i in range(20_000))),
    "GBNF quotes": ("grammar", 'root ::= "' + '\\"' * 120_000),
    "GBNF brackets": ("grammar", "root ::= " + "[" * 200_000),
    "GBNF comments": ("grammar", 'root ::= "a"\n' + "#\n" * 120_000),
    "GBNF blanks": ("grammar", "root ::=" + " " * 240_000 + '"a"'),
    "groups": ("regex", nested("(", "a", ")", 60_000)),
    "a repeat of a repeat": ("regex", "(a{1,1000}){1,1000}"),
    "a third repeat": ("regex", "((a{1,100}){1,100}){1,100}"),
    "a star of a star": ("regex", "(a*)*b"),
    "equal alternatives": ("regex", "(a|a)*" * 2000),
    "a long text": ("regex", ".{1,100000}"),
    "a far look back": ("regex", "[ab]*a[ab]{200}"),
    "unicode": ("regex", r"(\p{L}|\d|\s){1,500}[^a]{1,500}"),
    "30,000 alternatives": ("regex", "|".join(f"a{i}" for i in range(30_000))),
    "look-ahead": ("regex", "(?=a)b"),
    "an empty regex": ("regex", ""),
    "no character": ("regex", r"[^\x00-\x{10FFFF}]"),
    "many stars": ("regex", ".*a" * 400),
    "an explosion": ("regex", "(x+x+)+y"),
    "empty choices": ("choice", json.dumps([""] * 20_000)),
    "choices of choices": ("choice", json.dumps(["a" * i for i in range(1, 680)])),
    "odd choices": ("choice", json.dumps(["<|im_end|>", "\u0000", "\ufdd0", "/", '"', "\n"])),
    "infinity": ("json", '{"type":"string","maxLength":1e400}'),
    "deep enum": ("json", '{"enum":[' + nested("[", "", "]", 900) + "]}"),
    "deep const": ("json", '{"const":' + nested('{"a":', "1", "}", 900) + "}"),
    "deep items": ("json", nested('{"type":"array","items":', "{}", "}", 500)),
    "false": ("json", "false"),
    "a number": ("json", "5"),
    "half a character": ("json", '{"const":"\\ud800"}'),
    "a name twice": ("json", '{"type":"string","type":"integer"}'),
}  # fmt: skip


def _alternatives(count: int, either: Callable[[int], Any]) -> list[Any]:
    return [{"anyOf": either(i)} for i in range(count)]


SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a definition of itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "two of each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "another machine": {"$ref": "http://127.0.0.1:1/x.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "the standard": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    "its name elsewhere": {"$id": "http://127.0.0.1:1/a", "$schema": "http://127.0.0.1:1/s", "type": "object"},
    "products of objects": {
        "allOf": _alternatives(
            20, lambda i: [{"type": "object", "properties": {f"{name}{i}": {"const": 1}}} for name in "ab"]
        )
    },
    "products of strings": {
        "type": "string", "allOf": _alternatives(20, lambda i: [{"minLength": i}, {"maxLength": 100 + i}])
    },
    "1,500 objects": {
        "anyOf": [{"type": "object", "properties": {f"a{i}": {}}, "required": [f"a{i}"]} for i in range(1500)]
    },
    "an evil pattern": {"type": "string", "pattern": "^(a+)+$"},
    "a large pattern": {"type": "string", "pattern": "([ab]*a[ab]{60}){5}"},
    "a pattern of repeats": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "a pattern with lengths": {"type": "string", "pattern": "^(.*a.*b){20}$", "minLength": 500, "maxLength": 5000},
    "an invalid pattern": {"type": "string", "pattern": "("},
    "a long string": {"type": "string", "maxLength": 10**9},
    "no short string": {"type": "string", "minLength": 10**9},
    "many items": {"type": "array", "items": {}, "maxItems": 10**9},
    "not few items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "a negative length": {"type": "string", "maxLength": -1},
    "an empty range": {"type": "integer", "minimum": 5, "maximum": 1},
    "a wide range": {"type": "number", "minimum": 1.2345678901234567e-300, "maximum": 1.7e308},
    "all integers": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "a tiny step": {"type": "number", "multipleOf": 1e-300},
    "a large prime": {"type": "integer", "multipleOf": 2147483647, "minimum": 0},
    "no step": {"type": "integer", "multipleOf": 0},
    "20,000 values": {"enum": [f"v{i}" for i in range(20_000)]},
    "8,000 properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(8000)}},
    "2,000 patterns": {"type": "object", "patternProperties": {f"^a{i}.*": {"type": "string"} for i in range(2000)}},
    "not": {"not": {}},
    "an unknown type": {"type": "frog"},
    "no type": {"type": ["string", 5]},
    "a contradiction": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "options": {"x-guidance": {"whitespace_pattern": ".*", "lenient": True}, "type": "string", "not": {}},
    "a long uri": {"type": "string", "format": "uri", "maxLength": 100_000},
    "objects of objects": {"type": "object", "additionalProperties": {"$ref": "#"}},
    "a zero": {"const": "\u0000"},
    "300 objects": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(300)]
    },
}  # fmt: skip


def hostile() -> dict[str, Grammar]:
    """All of them."""
    found = {**dict(chains()), **dict(doublings())}
    found |= {name: Grammar(*text) for name, text in TEXTS.items()}
    return found | {name: schema(value) for name, value in SCHEMAS.items()}
