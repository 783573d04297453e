"""Costly inputs: grammars that are expensive, endless, recursive, odd or malformed, and small bodies that cost much.

Each is a function of its size in bytes. A grammar that nests, refers, repeats or doubles takes as many levels as the
size allows.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Make = Callable[[int], str]
DEEPEST = 900  # levels of one JSON value: the parsers of both sides refuse more
LAST = '"a"'


@dataclass(frozen=True, slots=True)
class HostileGrammar:
    """`kind`: the name in `structured_outputs`; the text of `json` and `choice` is JSON."""

    name: str
    kind: str
    make: Make


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def always(value: Any) -> Make:
    """Ignore the size: `value` is JSON, or text that stays as it is."""
    text = value if isinstance(value, str) else dump(value)
    return lambda _: text


def nest(opening: str, middle: str, closing: str, most: int = 1 << 30) -> Make:
    """Nest as deep as the size allows, at most `most` levels."""

    def make(size: int) -> str:
        levels = max(1, min(most, (size - len(middle)) // len(opening + closing)))
        return opening * levels + middle + closing * levels

    return make


def repeat(start: str, unit: str, end: str = "", between: str = "") -> Make:
    """Repeat a unit, in UTF-8 of the size; `#` in it becomes its number."""

    def make(size: int) -> str:
        width = len((unit + between).encode()) + 6 * unit.count("#")
        count = max(1, (size - len((start + end).encode())) // width)
        units = (unit.replace("#", str(i)) for i in range(count)) if "#" in unit else [unit] * count
        return start + between.join(units) + end

    return make


def rules(first: str, rule: str, last: str, most: int = 1 << 30) -> Make:
    """Chain rules: `#` becomes the number of a rule, `@` of the next one."""

    def make(size: int) -> str:
        count = max(1, min(most, (size - len(first + last)) // (len(rule) + 5 * (rule.count("#") + rule.count("@")))))
        chain = "".join(rule.replace("#", str(i)).replace("@", str(i + 1)) for i in range(count))
        return first + chain + last.replace("#", str(count))

    return make


def defs(link: Callable[[Any], Any], last: Any = None, most: int = 1 << 30) -> Make:
    """Chain definitions: `link` makes a definition from the reference to the next one."""

    def make(size: int) -> str:
        entry = len(dump({"d100000": link({"$ref": "#/$defs/d100000"})}))
        count = max(1, min(most, (size - 80) // entry))
        chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
        chain[f"d{count}"] = last or {"type": "string"}
        return dump({"$defs": chain, "$ref": "#/$defs/d0"})

    return make


def many(item: Callable[[int], Any], whole: Callable[[list[Any]], Any], most: int = 1 << 30) -> Make:
    """Make a schema of as many items as fit."""
    alone = len(dump(whole([item(100_000)])))
    width = len(dump(whole([item(100_000), item(100_001)]))) - alone
    return lambda size: dump(whole([item(i) for i in range(max(1, min(most, 1 + (size - alone) // width)))]))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _integers(items: list[Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in items}}


def _number(**limits: float) -> Make:
    return always({"type": "integer", **limits})


def _string(**limits: object) -> Make:
    return always({"type": "string", **limits})


def _array(**limits: object) -> Make:
    return always({"type": "array", "items": {"type": "string"}, **limits})


def _two(first: str, second: str) -> Callable[[int], dict[str, Any]]:
    return lambda i: {"anyOf": [_object(**{f"{first}{i}": {"const": 1}}), _object(**{f"{second}{i}": {"const": 2}})]}


CHAINS: Mapping[str, Make] = {
    "of references": defs(lambda ref: ref),
    "of anyOf": defs(lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "of oneOf": defs(lambda ref: {"oneOf": [ref, {"type": "null"}]}),
    "of allOf": defs(lambda ref: {"allOf": [ref]}),
    "of items": defs(lambda ref: {"type": "array", "items": ref}),
    "of prefixItems": defs(lambda ref: {"type": "array", "prefixItems": [ref], "minItems": 1}),
    "of properties": defs(lambda ref: _object(a=ref)),
    "of additionalProperties": defs(lambda ref: {"type": "object", "additionalProperties": ref}),
    "doubling by allOf": defs(lambda ref: {"allOf": [ref, ref]}, most=40),
    "doubling by anyOf": defs(lambda ref: {"anyOf": [ref, ref]}, most=40),
    "doubling by properties": defs(lambda ref: _object(a=ref, b=ref), most=40),
    "doubling by prefixItems": defs(lambda ref: {"type": "array", "prefixItems": [ref, ref], "minItems": 2}, most=40),
    "in a ring": defs(lambda ref: {"anyOf": [ref, {"type": "null"}]}, last={"$ref": "#/$defs/d0"}),
    "to itself": always({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "in a pair": always({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "to the root": always({"$ref": "#"}),
    "of nested roots": always({"type": "object", "additionalProperties": {"$ref": "#"}}),
    "to nothing": always({"$ref": "#/$defs/none"}),
    "over http": always({"$ref": "http://127.0.0.1:9/x.json"}),
    "into the file system": always({"$ref": "file:///etc/passwd"}),
    "to a relative file": always({"$ref": "x.json"}),
    "under a remote id": always({"$id": "http://127.0.0.1:9/a", "$schema": "http://127.0.0.1:9/s", "type": "object"}),
}
SCHEMAS: Mapping[str, Make] = {
    "arrays in arrays": nest('{"type":"array","items":', "{}", "}", DEEPEST),
    "objects in objects": nest('{"type":"object","properties":{"a":', "{}", "}}", DEEPEST // 2),
    "anyOf in anyOf": nest('{"anyOf":[', "{}", "]}", DEEPEST // 2),
    "not in not": nest('{"not":', "{}", "}", DEEPEST),
    "a deep const": lambda size: '{"const":' + nest('{"a":', "1", "}", DEEPEST)(size - 10) + "}",
    "a deep enum": lambda size: '{"enum":[' + nest("[", "", "]", DEEPEST)(size) + "]}",
    "integer properties": many(lambda i: i, lambda items: _integers(items)),
    "8,000 integer properties": always(_integers(list(range(8000)))),
    "required names": many(lambda i: f"p{i}", lambda names: {"type": "object", "required": names}),
    "patternProperties": many(
        lambda i: f"^a{i}.*", lambda names: {"type": "object", "patternProperties": {name: {} for name in names}}
    ),
    "enum": many(lambda i: f"value {i}", lambda items: {"enum": items}),
    "anyOf objects": many(lambda i: _object(**{f"a{i}": {"type": "string"}}), lambda items: {"anyOf": items}),
    "oneOf objects": many(lambda i: _object(k={"const": i}), lambda items: {"oneOf": items}),
    "allOf of anyOf": many(_two("a", "b"), lambda items: {"allOf": items}, most=30),
    "allOf of lengths": many(
        lambda i: {"anyOf": [{"minLength": i}, {"maxLength": 99 + i}]},
        lambda items: {"allOf": items, "type": "string"},
        most=30,
    ),
    "patterns of their own": many(
        lambda i: i,
        lambda items: {"type": "object", "properties": {f"p{i}": {"pattern": f"^{i}[a-z]{{9}}$"} for i in items}},
    ),
    "multipleOf a prime": _number(multipleOf=99999989),
    "multipleOf a smaller prime": _number(multipleOf=99991),
    "multipleOf the largest prime": _number(multipleOf=2147483647, minimum=0),
    "multipleOf nearly zero": always({"type": "number", "multipleOf": 1e-300}),
    "multipleOf zero": _number(multipleOf=0),
    "an empty range": _number(minimum=5, maximum=1),
    "a huge range": always({"type": "number", "minimum": 1.2345678901234567e-300, "maximum": 1.7e308}),
    "a range of 64 bits": _number(minimum=-(2**63), maximum=2**63 - 1),
    "maxLength 10^9": _string(maxLength=10**9),
    "minLength 10^9": _string(minLength=10**9),
    "maxLength 1e400": always('{"type":"string","maxLength":1e400}'),
    "maxLength -1": _string(maxLength=-1),
    "minItems 10^9": _array(minItems=10**9),
    "minItems 10^5": _array(minItems=10**5),
    "maxItems 10^9": _array(maxItems=10**9),
    "a pattern that backtracks": _string(pattern="^(a+)+$"),
    "a pattern of large states": _string(pattern="([ab]*a[ab]{60}){5}"),
    "a pattern of nested repetitions": _string(pattern="((a{1,100}){1,100}){1,100}"),
    "a pattern beside lengths": _string(pattern="^(.*a.*b){20}$", minLength=500, maxLength=5000),
    "an open pattern": _string(pattern="("),
    "a long pattern": lambda size: dump({"type": "string", "pattern": "(.*a)" * (size // 5 - 8)}),
    "a long format": _string(format="uri", maxLength=100_000),
    "an unknown type": always({"type": "frog"}),
    "a list of types": always({"type": ["string", 5]}),
    "no type in common": always({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "nothing": always({"not": {}}),
    "options of the library": always(
        {
            "x-guidance": {"whitespace_pattern": ".*", "lenient": True},
            "oneOf": [{"type": "string"}, {"type": "integer"}],
        }
    ),
    "a lone surrogate": always('{"const":"\\ud800"}'),
    "a NUL": always({"const": "\0"}),
    "equal names": always('{"type":"string","type":"integer"}'),
    "escaped unicode": repeat('{"const":"', "\\u4e2d", '"}'),
    "true": always("true"),
    "false": always("false"),
    "a number": always("5"),
    "half a schema": always('{"type":'),
}
REGEXES: Mapping[str, Make] = {
    "groups": nest("(", "a", ")"),
    "groups doubled": nest("(", "a", "){2}", 30),
    "groups of 1,000": nest("(", "a", "){1,1000}", 3),
    "groups of 100": nest("(", "a", "){1,100}", 3),
    "stars of stars": nest("(", "a", ")*", 200),
    "open groups": repeat("", "("),
    "alternatives": repeat("", "a#", between="|"),
    "equal alternatives": repeat("", "(a|a)*"),
    "any text, often": repeat("", ".*a"),
    "any text in repetitions": always("(.*a.*b.*c){1,20}"),
    "any text, long": always(".{1,100000}"),
    "a late difference": always("[ab]*a[ab]{200}"),
    "words": always(r"\w{1,5000}"),
    "letters of all scripts": always(r"(\p{L}|\d|\s){1,500}[^a]{1,500}"),
    "no character": always(r"[^\x00-\x{10FFFF}]"),
    "a look ahead": always("(?=a)b"),
    "no text": always(""),
}
LARK: Mapping[str, Make] = {
    "groups": nest("(", LAST, ")"),
    "open groups": repeat("start: ", "("),
    "options": nest("[", LAST, "]"),
    "rules": rules("start: r0\n", "r#: r@\n", 'r#: "a"\n'),
    "terminals": rules("start: T0\n", "T#: T@\n", 'T#: "a"\n'),
    "terminals doubled": rules("start: T0\n", "T#: T@ T@\n", 'T#: "a"\n', most=40),
    "rules doubled": rules("start: r0\n", "r#: r@ r@\n", 'r#: "a"\n', most=40),
    "left recursion": always('start: start "a" | "a"'),
    "itself": always("start: start"),
    "a terminal in itself": always('start: A\nA: A "x" | "y"'),
    "negations": repeat("start: A\nA: ", "~", LAST),
    "intersections": repeat("start: A\nA: ", "/[a-z]*#[a-z]{9}/", between=" & "),
    "terminals beside each other": rules("start: T0\n", "T#: /a#[a-z]*/ | T@\n", 'T#: "a"\n'),
    "a million": always('start: "a"{1,1000000}'),
    "repetitions": nest("(", LAST, "){1,1000}", 3),
    "a deep schema": lambda size: "start: %json " + SCHEMAS["arrays in arrays"](size),
    "substrings": repeat('start: A\nA: %regex {"substring_chars": "', "ab", '"}'),
    "words of a text": repeat('start: A\nA: %regex {"substring_words": "', "ab ", '"}'),
    "a special token": always('start: <|im_end|> "a"'),
    "a range of tokens": always("start: <[0-100000000]>"),
    "another grammar": always("start: @other"),
    "an open expression": always('start: / "test"\n'),
    "an open text": always('start: "abc'),
    "no rule": always("start:"),
    "accents": always("start: é /é"),
}
GBNF: Mapping[str, Make] = {
    "new lines": repeat("", "\n"),
    "blanks": repeat("root ::=", " ", LAST),
    "comments": lambda size: 'root ::= "a"\n' + "#\n" * (size // 2 - 7),
    "rules": rules("root ::= a0\n", "a# ::= a@\n", 'a# ::= "x"\n'),
    "groups": lambda size: "root ::= " + nest("(", LAST, ")")(size - 9),
    "alternatives": repeat("root ::= ", '"a#"', between=" | "),
    "quotes": repeat('root ::= "', '\\"'),
    "brackets": repeat("root ::= ", "["),
}
CHOICES: Mapping[str, Make] = {
    "many": many(lambda i: f"choice {i}", lambda items: items),
    "empty": many(lambda _: "", lambda items: items),
    "ever longer": lambda size: dump(["a" * i for i in range(1, int((2 * size) ** 0.5) - 4)]),
    "specials": always(["<|im_end|>", "\0", "\ufdd0", "/", '"', "\n"]),
    "none": always([]),
}
KINDS = {"json": {**CHAINS, **SCHEMAS}, "regex": REGEXES, "lark": LARK, "gbnf": GBNF, "choice": CHOICES}


def grammars() -> list[HostileGrammar]:
    fields = {"lark": "grammar", "gbnf": "grammar"}
    return [
        HostileGrammar(f"{kind}: {name}", fields.get(kind, kind), make)
        for kind, table in KINDS.items()
        for name, make in table.items()
    ]


def _nested_objects(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = _object(a=schema)
    return schema


BESIDE_CHATS: tuple[dict[str, Any], ...] = (
    _nested_objects(199),
    {"enum": [f"value {number} {'x' * (number % 7)}" for number in range(20_000)]},
    {"type": "string", "pattern": "^(a+)+(b|a){1,200}(c*)*$"},
    {
        "$defs": {"node": {"type": "object", "properties": {side: {"$ref": "#/$defs/node"} for side in ("l", "r")}}},
        "$ref": "#/$defs/node",
    },
)
"""Schemas that a server enforces or refuses beside chats."""


# --- request bodies

CHAT, COMPLETIONS, BATCHES = "/v1/chat/completions", "/v1/completions", "/v1/batches"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
MAX_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 32 * 1024  # parsed on the event loop itself


@dataclass(frozen=True, slots=True)
class Bomb:
    """A body that costs more than it weighs. `text(size)` has at most `size` bytes; `statuses`: right answers."""

    name: str
    path: str
    text: Make
    statuses: tuple[int, ...] = (400,)

    def make(self, size: int) -> bytes:
        return self.text(size).encode("utf-8", "surrogatepass")


def repeated(start: str, unit: str, end: str) -> Make:
    """Return a body of units with commas between them."""
    return repeat(start, unit, end, ",")


UNITS = {
    "empty objects": "{}", "nulls": "null", "numbers": "1", "texts": '"a"', "arrays": "[]", "objects": '{"a":{}}',
}  # fmt: skip
"""Items that no list of requests takes."""
NAMES = '"#":0'
HI = '"messages":[{"role":"user","content":"hi"}]'
GOOD = '{"role":"user","content":"x"}'
PART, CALL = '{"type":"text","text":""}', '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
BLOCKS = {
    "images": '{"type":"image"}', "texts of nothing": PART, "wrong texts": '{"type":"text","text":1}',
    "calls": '{"type":"tool_use","id":"a","name":"f","input":{}}', "thoughts": '{"type":"thinking","thinking":""}',
    "results": '{"type":"tool_result","tool_use_id":"a"}',
}  # fmt: skip
ITEMS = {
    "unknown types": '{"type":"computer_call"}', "wrong fields": '{"role":1,"content":2,"a":3,"b":4}', "good": GOOD,
    "calls": '{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
    "thoughts": '{"type":"reasoning","summary":[]}',
    "outputs": '{"type":"function_call_output","call_id":"a","output":[]}',
}  # fmt: skip
TEXTS = {
    "words": "the quick brown fox ", "one letter": "a", "digits": "0123456789", "control tokens": "<|im_end|>",
    "combining marks": "a\u0301\u0323", "emoji": "\U0001f469\u200d\U0001f4bb", "Chinese": "\u4e2d\u6587",
    "escapes": "\\u4e2d", "quotes": '\\"', "brackets": "[{,", "spaces": " ", "new lines": "\\n",
    "noncharacters": "\ufdd0",
}  # fmt: skip


def _lists(model: str) -> Iterator[tuple[str, str, str, str, dict[str, str]]]:
    """Yield (name, path, start, end, units) of each list in a request."""
    head, nine = f'{{"model":"{model}",', f'{{"model":"{model}","max_tokens":9,'
    parts, calls = '[{"role":"user","content":[', '[{"role":"assistant","content":"","tool_calls":['
    yield "chat messages", CHAT, head + '"messages":[', "]}", {"good": GOOD, "of a king": '{"role":"king"}', **UNITS}
    yield "chat parts", CHAT, head + f'"messages":{parts}', "]}]}", {"good": PART, "wrong": '{"type":1,"a":3}', **UNITS}
    yield "chat calls", CHAT, head + f'"messages":{calls}', "]}]}", {"good": CALL, **UNITS}
    ids = {"ids": "1", "large ids": "99999", "negative ids": "-1", "fractions": "0.5", "empty prompts": '""'}
    yield "prompt", COMPLETIONS, head + '"prompt":[', "]}", ids | {"objects": "{}", "of an id": "[1]"}
    yield "response items", RESPONSES, head + '"input":[', "]}", ITEMS | UNITS
    yield "messages", MESSAGES, nine + '"messages":[', "]}", {"good": GOOD, **UNITS}
    yield "message blocks", MESSAGES, nine + f'"messages":{parts}', "]}]}", BLOCKS | UNITS


def _fields(model: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, path, start) of fields that hold an object or a list; the body ends with one brace."""
    head, nine = f'{{"model":"{model}",', f'{{"model":"{model}","max_tokens":9,'
    for name in ("tools", "response_format", "stop", "logit_bias"):
        yield f"chat {name}", CHAT, f'{head}{HI},"{name}":'
    for name in ("tools", "include", "text", "reasoning"):
        yield f"response {name}", RESPONSES, f'{head}"input":"x","{name}":'
    for name in ("system", "tools", "tool_choice", "thinking", "stop_sequences"):
        yield f"message {name}", MESSAGES, f'{nine}{HI},"{name}":'


def _single(model: str) -> Iterator[Bomb]:
    """Yield long values, deep values and many names."""
    head, nine = f'{{"model":"{model}",', f'{{"model":"{model}","max_tokens":9,'
    messages, prompt = head + '"messages":[', head + '"prompt":'
    for name, path, start in (
        ("chat", CHAT, head + HI),
        ("response", RESPONSES, head + '"input":"x"'),
        ("message", MESSAGES, nine + HI),
        ("batch", BATCHES, '{"input_file_id":"file-x"'),
    ):
        yield Bomb(f"{name}: unknown names", path, repeated(start + ",", NAMES, "}"))
        yield Bomb(f"{name}: a long name", path, repeat(start + ',"', "x", '":0}'))
    for name, text in TEXTS.items():
        start, right = messages + '{"role":"user","content":"x', (200,) if text in (" ", "\\n") else (400,)
        yield Bomb(f"text of {name}", CHAT, repeat(start, text, '"}]}'), right)
    for name, path, start, end in (
        ("a prompt", COMPLETIONS, prompt + '"', '"}'), ("a response", RESPONSES, head + '"input":"', '"}'),
        ("instructions", RESPONSES, head + '"input":"x","instructions":"', '"}'),
        ("a system", MESSAGES, f'{nine}{HI},"system":"', '"}'),
        ("text to count", COUNT, messages + '{"role":"user","content":"', '"}]}'),
    ):  # fmt: skip
        yield Bomb(f"words of {name}", path, repeat(start, "the quick brown fox ", end))
    yield Bomb("a long role", CHAT, repeat(messages + '{"content":"x","role":"', "x", '"}]}'))
    yield Bomb("a long model", CHAT, repeat(f'{{{HI},"model":"', "x", '"}'), (404,))
    yield Bomb("a long number", CHAT, repeat(f'{head}{HI},"seed":', "1", "}"))
    yield Bomb("a long window", BATCHES, repeat('{"input_file_id":"","endpoint":"","completion_window":"', "1", 'h"}'))
    yield Bomb("messages 1,000 deep", CHAT, always(messages + '[{"a":' * 500 + "}]" * 500 + "]}"))
    yield Bomb("tools 1,000 deep", CHAT, always(f'{head}{HI},"tools":' + "[" * 1000 + "]" * 1000 + "}"))
    yield Bomb("a prompt 500 deep", COMPLETIONS, always(prompt + '{"a":' * 500 + "}" * 500 + "}"))
    yield Bomb("opening brackets", CHAT, repeat(messages, "["))
    yield Bomb("an error at the end", CHAT, repeated(head + '"metadata":[', "[]", "}"))
    yield Bomb("many prompts", COMPLETIONS, repeated(prompt + "[", f"[{','.join(['12345'] * 300)}]", "]}"))


def joined(model: str) -> Iterator[Bomb]:
    """Yield bodies whose pieces of text a server puts together to one prompt."""
    nine, thoughts = f'{{"model":"{model}","max_tokens":9,', '"messages":[{"role":"assistant","content":['
    items, end = f'{{"model":"{model}","input":[', ']},{"role":"user","content":"x"}]}'
    for name, path, start, opening, closing, after, statuses in (
        ("messages: a system", MESSAGES, f'{nine}{HI},"system":[', '{"type":"text","text":"', '"}', "]}", (400,)),
        ("messages: thoughts", MESSAGES, nine + thoughts, '{"type":"thinking","thinking":"', '"}', end, (400,)),
        ("responses: a system", RESPONSES, items, '{"role":"system","content":"', '"}', "]}", (400,)),
        ("responses: a thought", RESPONSES, items,
         '{"type":"reasoning","summary":[{"type":"summary_text","text":"', '"}]}', "]}", (200, 400)),
    ):  # fmt: skip
        yield Bomb(f"{name} in pieces", path, pieces(start, opening, closing, after), statuses)


def pieces(start: str, opening: str, closing: str, end: str) -> Make:
    """Fill a body with 4,000 equal texts, or with fewer texts of one letter."""

    def make(size: int) -> str:
        room = size - len(start + end)
        count = min(4000, room // len(opening + closing + "a,"))
        text = "a" * (room // count - len(opening + closing + ","))
        return start + ",".join([opening + text + closing] * count) + end

    return make


def bombs(model: str) -> list[Bomb]:
    """List all bodies for a server that calls its model so."""
    found = [
        Bomb(f"{name}: {kind}", path, repeated(start, unit, end))
        for name, path, start, end, units in _lists(model)
        for kind, unit in units.items()
    ]
    for name, path, start in _fields(model):
        found.append(Bomb(f"{name} of objects", path, repeated(start + "[", '{"a":{}}', "]}")))
        found.append(Bomb(f"{name} of texts", path, repeated(start + "[", '"#"', "]}")))
        found.append(Bomb(f"{name} of names", path, repeated(start + "{", NAMES, "}}")))
    return [*found, *_single(model), *joined(model)]
