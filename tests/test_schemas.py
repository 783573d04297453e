"""Schemas of clients as grammars: exact numbers, closed objects, options that are apart, formats that only annotate."""

import functools
import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema_rs
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.tables import for_each
from test_tools import FORMATS, Function, Parsing, take_apart

import engine.models.demo
from engine.errors import InvalidRequestError
from engine.forms import Grammar, ThoughtMarks
from engine.structured.compiler import GrammarCompiler
from gateway.generate.answer_form import form_of, grammar_of, read_form
from gateway.generate.completions import CHAT
from gateway.generate.grammars import integer_pattern
from gateway.generate.schemas import BOUNDS, prepared
from gateway.generate.wire import CompletionRequest

FOLDER = Path(engine.models.demo.__file__ or "").parent / "weights"
EOS = 2


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, 2560, frozenset({EOS}))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def grammar(schema: Any) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    found = grammar_of(CompletionRequest(model="m", prompt="x", structured_outputs={"json": text}))
    assert found is not None
    return found


def draw(asked: Grammar, seed: int, most: int = 200) -> str | None:
    """A random text of the grammar; None if it does not end."""
    matcher, rng, token_ids = compiler().compile(asked).matcher(), random.Random(seed), list[int]()
    bits = np.zeros(compiler().mask_words, dtype=np.int32)
    while len(token_ids) < most:
        matcher.write_mask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if EOS in allowed:
            return str(compiler().load().decode_str(token_ids))
        token_ids.append(int(rng.choice(list(allowed))))
        matcher.advance(token_ids[-1:])
        assert matcher.failed is None
    return None


def drawn(schema: Any, count: int = 8) -> list[Any]:
    texts = [draw(grammar(schema), seed) for seed in range(count)]
    values = [json.loads(text) for text in texts if text is not None]
    assert values
    return values


# Numbers

LARGE = [2**53 + 1, 1234567890123456789, -(2**53) - 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]


DIGITS = st.text("0123456789", min_size=1, max_size=22)
NUMBERS = st.one_of(
    st.sampled_from(["1", "1.0", "-0.0", "1e-400", "12345678901234567.5", "1e16", str(2**64 + 1), *map(str, LARGE)]),
    st.floats(-(2.0**63), 2.0**63).map(json.dumps), st.integers(-(2**70), 2**70).map(str),
    st.builds("0.{}{}".format, DIGITS, st.sampled_from(["", "e-7", "E+9", "e-300"])),
)  # fmt: skip
HERE = [987654]
PLACES = [
    {"enum": HERE}, {"anyOf": [{"const": True}, {"enum": HERE}]}, {"enum": [{"ids": HERE}]}, closed(y={"enum": HERE}),
    {"type": "array", "items": {"enum": HERE}, "minItems": 2},
]  # fmt: skip


def is_exact(text: str) -> bool:
    value = json.loads(text)
    return -(2**63) <= value < 2**64 and Decimal(text) == Decimal(str(value))


@fuzz(60)
@given(
    st.lists(NUMBERS, min_size=1, max_size=3),
    st.sampled_from(PLACES),
    st.sampled_from(sorted({*FORMATS} - {"harmony"})),
)
def test_listed_numbers_are_written_exactly_or_refused(numbers: list[str], place: Any, name: str) -> None:
    schema, exact = closed(x=place), all(map(is_exact, numbers))
    function = {"name": "f", "strict": True, "parameters": schema}
    call = {"tool_choice": "required", "thinking_token_budget": 0, "parallel_tool_calls": False}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"tools": [{"type": "function", "function": function}], **call},
    ):
        body = {"messages": [{"role": "user", "content": "0.10000000000000000001"}], **fields}
        try:
            parsed = CHAT.parse(json.dumps(body).replace(str(HERE[0]), ",".join(numbers)).encode())
            asked = read_form(parsed, FORMATS[name], ThoughtMarks((1,), (2,)), "tools").grammar({}, form_of(parsed))
        except InvalidRequestError as error:
            assert not exact and (error.param or "").startswith(next(iter(fields)))
            continue
        text, found = draw(asked or grammar(True), 0, 2000), list[str]()
        assert exact and text is not None
        if parsed.tools:
            text = take_apart(Parsing(FORMATS[name], [Function("f", {})]), [text]).calls[0].arguments
        json.loads(text, parse_float=found.append, parse_int=found.append)
        assert {*map(Decimal, found)} <= {*map(Decimal, numbers)}


@for_each(
    "schema",
    [
        '{"const": 18446744073709551617}',
        '{"enum": [[1e300]]}',
        '{"type": "integer", "maximum": 18446744073709551617}',
        '{"type": "number", "minimum": 9007199254740993}',
        '{"type": "integer", "minimum": 9007199254740993, "multipleOf": 2}',
        '{"type": "integer", "minimum": 9007199254740993, "exclusiveMaximum": true}',
        '{"enum": [9007199254740993], "maximum": "x"}',
        '{"enum": [9007199254740993], "type": "string"}',
        '{"enum": [1e-99999999999999999999999]}',
        '{"type": "integer", "minimum": 9007199254740994, "maximum": 9007199254740993}',
        '{"allOf": [{"const": 9007199254740993}, {"type": "integer"}]}',
    ],
)
def test_numbers_that_cannot_be_exact_are_refused(schema: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        compiler().compile(grammar(schema))
    assert caught.value.param == "structured_outputs.json" and "\n" not in caught.value.message


def test_integer_bounds_of_any_size_are_exact() -> None:
    rng = random.Random(1)
    for _ in range(200):
        names = [name for name in BOUNDS if rng.random() < 0.5]
        bounds = {
            name: rng.choice([rng.randint(-1200, 1200), rng.randint(-20, 20), rng.uniform(-9, 9)]) for name in names
        }
        fits = jsonschema_rs.validator_for({"type": "integer", **bounds}).is_valid
        numbers = [*range(-40, 40), *(rng.randint(-1300, 1300) for _ in range(200))]
        try:
            pattern = re.compile(integer_pattern(bounds))
        except ValueError:
            assert not any(map(fits, range(-1300, 1300)))
        else:
            assert [bool(pattern.fullmatch(str(n))) for n in numbers] == [fits(n) for n in numbers]


# Names


def test_objects_have_the_names_of_their_schema_only() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}}
    schema = {
        "$defs": {"I": inner},
        "type": "object",
        "properties": {"a": inner, "l": {"items": {"$ref": "#/$defs/I"}}},
    }
    for value in drawn(schema, 30):
        jsonschema_rs.validator_for(schema).validate(value)
        assert value.keys() <= {"a", "l"} and value.get("a", {}).keys() <= {"b"}
    assert {*drawn({"type": "object", "properties": {}}, 3)[0]} == set()
    assert all(set(value) == {"c"} for value in drawn({"properties": {}, "type": "object", "required": ["c"]}, 9))


@for_each(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object", "properties": {"a": {}}, "minProperties": 2},
        {"enum": [{"properties": {"a": 1}}]},
        {"type": "string", "default": {"properties": {}}},
    ],
)
def test_what_says_more_is_not_closed(schema: dict[str, Any]) -> None:
    assert prepared(schema) == schema


def test_schemas_for_one_value_do_not_close_each_other() -> None:
    base, more = closed(x={"type": "integer", "minimum": 10, "maximum": 99}), closed(y={"type": "boolean"})
    for schema in (
        {"$defs": {"B": base}, "allOf": [{"$ref": "#/$defs/B"}, more]},
        {**base, "anyOf": [more, {"required": ["z"], "properties": {"z": {"type": "null"}}}]},
        {"$defs": {"B": base}, "$ref": "#/$defs/B", **more},
    ):
        for value in drawn(schema, 20):
            jsonschema_rs.validator_for(schema).validate(value)
    alone = prepared({"$defs": {"B": base}, "allOf": [{"$ref": "#/$defs/B"}]})
    assert alone["$defs"]["B"]["additionalProperties"] is False


# Options and formats


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: Annotated[list[Literal["sit"]], pydantic.Field(max_length=2)]


class Pair(pydantic.BaseModel):
    kind: Literal["pair"]
    both: "Annotated[list[Animal], pydantic.Field(max_length=2)]"


Animal = Annotated[Cat | Dog | Pair, pydantic.Field(discriminator="kind")]


class Owner(pydantic.BaseModel):
    pet: Animal


@pytest.mark.parametrize("model", [Owner, Pair])
def test_discriminated_unions_of_pydantic(model: type[pydantic.BaseModel]) -> None:
    model.model_rebuild()
    for value in drawn(model.model_json_schema(), 20):
        model.model_validate(value)


REFS = {
    "$defs": {
        "A": closed(a={"type": "boolean"}),
        "B": closed(b={"const": 1}),
        "E": {"enum": ["x", 1]},
        "N": {"type": "null"},
    }
}


@for_each(
    ("options", "apart"),
    [
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/N"}], True),
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], True),
        ([{"$ref": "#/$defs/E"}, {"const": "y"}, {"enum": [2, 3]}], True),
        ([{"$ref": "#/$defs/E"}, {"$ref": "#/$defs/N"}, {"type": "boolean"}], True),
        ([closed(k={"const": "a"}), closed(k={"const": "b"})], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"$ref": "#/$defs/E"}, {"const": "x"}], False),
        ([{"$ref": "#/$defs/E"}, {"const": 1.0}], False),
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], False),
        ([{"$ref": "#/$defs/A"}, {"type": "object"}], False),
        ([{"$ref": "#/$defs/A"}, {}], False),
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/none"}], False),
        ([{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}], False),
    ],
)
def test_one_of_is_enforced_where_no_value_fits_two_options(options: list[Any], apart: bool) -> None:
    schema = {**REFS, "type": "object", "properties": {"p": {"oneOf": options}}, "required": ["p"]}
    if not apart:
        with pytest.raises(InvalidRequestError):
            compiler().compile(grammar(schema))
        return
    for value in drawn(schema, 10):
        jsonschema_rs.validator_for(schema).validate(value)


def test_overlapping_options_are_named() -> None:
    with pytest.raises(InvalidRequestError, match='"oneOf" may overlap; use "anyOf"'):
        compiler().compile(grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}))


@for_each(
    "name",
    ["password", "path", "file-path", "binary", "byte", "json-string", "color", "phone", "multi-host-uri", "int64"],
)
def test_formats_that_only_annotate_are_ignored(name: str) -> None:
    assert prepared(closed(v={"type": "string", "format": name})) == prepared(closed(v={"type": "string"}))
    assert prepared({"format": name}) == {} and prepared({"properties": {"format": {}}})["properties"] == {"format": {}}


IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "object", "additionalProperties": {"type": "null"}}, {"propertyNames": {"type": "string"}}),
    ({"type": "object", "properties": {}}, {"dependentRequired": {}, "dependentSchemas": {}, "propertyNames": True}),
    ({"type": "object", "additionalProperties": True}, {"unevaluatedProperties": True, "uniqueItems": True}),
    ({"type": "array", "items": {"type": "null"}}, {"uniqueItems": False, "minContains": 0, "unevaluatedItems": {}}),
    ({"type": ["string", "null"]}, {"contains": {"const": 1}, "minContains": 2, "propertyNames": {"pattern": "x"}}),
    ({"type": "boolean"}, {"then": {"const": True}, "else": {"const": False}, "not": False}),
    ({"type": "boolean"}, {"if": {"const": True}}),
]
"""Schemas with keywords that admit every value."""


@for_each(("schema", "idle"), IDLE)
def test_keywords_without_effect_are_ignored(schema: dict[str, Any], idle: dict[str, Any]) -> None:
    assert prepared(closed(v={**schema, **idle})) == prepared(closed(v=schema))
    for value in drawn(closed(v={**schema, **idle}), 3):
        jsonschema_rs.validator_for(closed(v=schema)).validate(value)


@for_each(
    "schema",
    [
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^x"}},
        {"type": ["string", "object"], "dependentRequired": {"a": ["b"]}},
        {"type": "boolean", "if": {"const": True}, "then": {"const": False}},
        {"type": "boolean", "not": {"const": True}},
        {"uniqueItems": True},
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="not supported here: the keyword"):
        compiler().compile(grammar(closed(v=schema)))


def test_decimals_of_pydantic_are_numbers() -> None:
    """Up to pydantic 2.13 their schema also admits texts, with a look-around that no grammar has."""
    text = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    for value in drawn(closed(price={"anyOf": [{"type": "number"}, text]}), 10):
        assert isinstance(value["price"], int | float)


@for_each(
    ("pattern", "looks"),
    [("(?!a)b", True), ("(?<=a)b", True), ("a(?<!x)", True), (r"\(?=", False), ("[(?=]", False), ("(?:a)", False)],
)
def test_options_with_a_look_around_are_left_out(pattern: str, looks: bool) -> None:
    options: list[Any] = [{"type": "string", "pattern": pattern}, {"type": "null"}]
    assert prepared({"anyOf": options})["anyOf"] == options[looks:]
    assert prepared({"anyOf": options[:1]})["anyOf"] == options[:1]


@pytest.mark.parametrize("pattern", ["[" * 100_000, "[" * 100_000 + "\\", "(?" * 50_000, "\\" * 99_999])
def test_patterns_are_read_in_linear_time(pattern: str) -> None:
    options = [{"type": "string", "pattern": pattern}, {"type": "null"}]
    assert len(prepared({"anyOf": options})["anyOf"]) == 2


@for_each("name", ["uuid", "uuid4", "date", "ipv4"])
def test_formats_are_enforced(name: str) -> None:
    schema = {"type": "string", "format": name.removesuffix("4") if name == "uuid4" else name}
    for value in drawn({"type": "string", "format": name}, 5):
        assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value) or UUID(value)
