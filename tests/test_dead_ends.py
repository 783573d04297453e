"""Answers under a grammar can always be completed, and follow the grammar; one dialect in all forms."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

import engine.models.demo
from engine.errors import InvalidRequestError
from engine.forms import Grammar, GrammarKind
from engine.structured.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_form import form_of
from gateway.generate.schemas import names_of
from gateway.generate.wire import CompletionRequest

FOLDER = Path(engine.models.demo.__file__ or "").parent / "weights"
EOS = 2
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
NEVER: dict[str, Any] = {"type": "integer", "minimum": 5, "maximum": 3}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(FOLDER), probe=False)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, 4096, frozenset({EOS}))


def closed(**more: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **more}


def answer(schema: Any, draw: random.Random, steps: int = 80) -> str:
    """Follow random tokens, later preferably those that close; every state has a next token, up to the end."""
    body = CompletionRequest.model_validate({"model": "m", "prompt": "p", "guided_json": schema})
    form = form_of(body)
    assert form is not None
    matcher, ids = compiler().compile(form).matcher(), list[int]()
    for step in range(4 * steps):
        mask = np.zeros(compiler().mask_words, dtype=np.int32)
        matcher.write_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        text = tokenizer().decode(ids, False)
        assert matcher.failed is None and allowed, f"a dead end: {text}"
        if EOS in allowed and (step > steps or len(allowed) == 1 or draw.random() < 0.3):
            return text
        allowed = [token for token in allowed if token != EOS]
        closing = (
            [token for token in allowed if tokenizer().decode([token], False)[:1] in '"]}'] if step > steps else []
        )
        ids.append(draw.choice(closing or allowed))
        matcher.advance(ids[-1:])
    return ""


def check(schema: Any, walks: int) -> None:
    for seed in range(walks):
        if text := answer(schema, random.Random(seed)):
            assert jsonschema_rs.is_valid(schema, json.loads(text)), text


USED_UP: dict[str, Any] = {
    "a name": closed(properties={"a": DIGIT}, required=["a"], patternProperties={"^a$": {"type": "integer"}}),
    "a narrower pattern": closed(properties={"a": DIGIT}, patternProperties={"^a$": {"type": "integer", "maximum": 4}}),
    "alternatives": closed(properties={"a": DIGIT, "b": DIGIT}, patternProperties={"^(a|b)$": DIGIT}),
    "a class": closed(properties={"a": DIGIT, "b": DIGIT}, patternProperties={"^[ab]$": DIGIT}),
    "two patterns": closed(properties={"a": DIGIT, "b": DIGIT}, patternProperties={"^a$": DIGIT, "^b$": DIGIT}),
    "required names": closed(patternProperties={"^(x|y)$": DIGIT}, required=["x", "y"]),
    "no other names": {**closed(properties={"a": DIGIT}, patternProperties={"^a$": {}}), "additionalProperties": NEVER},
    "beside a pattern that nothing fits": closed(properties={"a": DIGIT}, patternProperties={"^a$": {}, "^b": NEVER}),
    "in a part": {"allOf": [closed(properties={"a": DIGIT}, patternProperties={"^a$": DIGIT})]},
    "references": closed(
        properties={"a": {"$ref": "#/$defs/p"}}, patternProperties={"^a$": {"$ref": "#/$defs/q"}},
        **{"$defs": {"p": DIGIT, "q": {"type": "integer", "maximum": 4}}},
    ),
    "unevaluated": {"type": "object", "properties": {"a": DIGIT}, "unevaluatedProperties": False},
    "unevaluated beside patterns": {
        "type": "object", "patternProperties": {"^[xy]$": DIGIT}, "required": ["x"], "unevaluatedProperties": False
    },
    "unevaluated beside additional": closed(properties={"a": DIGIT}, unevaluatedProperties=False),
}  # fmt: skip


@pytest.mark.parametrize("name", USED_UP)
def test_no_comma_follows_the_last_possible_name(name: str) -> None:
    check(USED_UP[name], walks=25)


def test_unevaluated_properties_of_several_schemas_are_refused_at_once() -> None:
    schema = {"anyOf": [{"properties": {"a": DIGIT}}], "unevaluatedProperties": False}
    with pytest.raises(InvalidRequestError, match="unevaluatedProperties"):
        answer(schema, random.Random(0))


LEAVES = st.sampled_from([
    DIGIT, NEVER, {"type": "boolean"}, {"enum": [1, "a", None]}, {"type": "string", "pattern": "^a{1,2}$"},
    {"type": "integer", "minimum": 0, "maximum": 7, "multipleOf": 5}, {"type": "string", "maxLength": 2},
])  # fmt: skip
NAMES = st.lists(st.sampled_from("abc"), max_size=2, unique=True)
PATTERNS = st.sampled_from(["^a$", "^(a|b)$", "^[a-c]$", "b", "^x_", "^[ab]{1,2}$", "^$"])


def larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), parts, max_size=2)},
        optional={
            "patternProperties": st.dictionaries(PATTERNS, parts, max_size=2), "required": NAMES,
            "additionalProperties": st.just(False) | parts, "unevaluatedProperties": st.just(False),
        },
    )  # fmt: skip
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": parts, "maxItems": st.integers(0, 2)})
    return objects | arrays | st.fixed_dictionaries({"anyOf": st.lists(parts, min_size=1, max_size=2)})


@pytest.mark.slow
@settings(max_examples=examples(80), deadline=None)
@given(st.recursive(LEAVES, larger, max_leaves=5))
def test_a_schema_is_refused_at_once_or_every_answer_can_end(schema: Any) -> None:
    try:
        answer(schema, random.Random(0))
    except InvalidRequestError:
        return
    check(schema, walks=3)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a$", {"a"}), ("^(a|bc)d$", {"ad", "bcd"}), ("^a?$|^[x-z]$", {"", "a", "x", "y", "z"}), (r"^\x61\$$", {"a$"}),
        ("^a{2}b?$", {"aa", "aab"}), ("a", None), ("^a", None), ("^a$|b", None), (r"^\d$", None), ("^a*$", None),
        ("(?i)^a$", None), ("^.$", None), ("^[^a]$", None), ("^(a{0,99}){99}$", None), ("(", None), ("^(?=a)a$", None),
    ],
)  # fmt: skip
def test_names_of_a_pattern(pattern: str, names: set[str] | None) -> None:
    assert names_of(pattern) == names


def takes(kind: GrammarKind, grammar: str, text: str) -> bool:
    matcher = compiler().compile(Grammar(kind, grammar, param="x")).matcher()
    matcher.advance(tokenizer().encode(text))
    return matcher.failed is None and matcher.complete


@pytest.mark.parametrize(
    ("escape", "right", "wrong"),
    [
        (r"\d", "5", "８५x"), (r"\w", "5x_", "é８ "), (r"\s", " \n\v", "\u3000\xa0x"), (r"\D", "x８ ", "5"),
        (r"\W", "é ", "5x_"), (r"\S", "xé８", " \u3000\n"), (r"[\d.]", "5.", "８x"), (r"[^\s\d]", "x８", " \u30005"),
        (r"\\d", "", "5"),
    ],
)  # fmt: skip
def test_regular_expressions_have_one_dialect(escape: str, right: str, wrong: str) -> None:
    schemas = CompletionRequest.model_validate(
        {"model": "m", "prompt": "p", "guided_json": {"type": "string", "pattern": f"^{escape}$"}}
    )
    schema = form_of(schemas)
    assert schema is not None
    for text in right + wrong:
        expected = text in right
        assert takes("regex", escape, text) is expected, text
        assert takes("grammar", f"start: /{escape}/ // {escape}\n", text) is expected, text
        if text.isprintable():
            assert takes("json", schema.text, json.dumps(text, ensure_ascii=False)) is expected, text


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9"', "é"), (r"root ::= [\u4e00-\u4e10]", "丁"), (r'root ::= "\U0001F600"', "😀"),
        (r'root ::= "\u0022" "\x41"', '"A'), (r"root ::= [^\u00e9]", "e"), (r'root ::= "\\u00e9\n"', "\\u00e9\n"),
        (r'start: "\\d" /\d/', "\\d5"),
    ],
)  # fmt: skip
def test_escapes_of_grammars(grammar: str, text: str) -> None:
    assert takes("grammar", grammar, text)


def test_a_surrogate_in_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"\\ud800 is no character"):
        takes("grammar", r'root ::= "\ud800"', "")
