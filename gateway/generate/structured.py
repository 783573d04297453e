"""Structured outputs: convert `response_format` (OpenAI), `structured_outputs` and `guided_*` (vLLM) to a grammar.

The engine decides whether it can enforce the grammar.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from engine.errors import InvalidRequestError
from engine.forms import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from gateway.generate.lark import Lark
from gateway.generate.schemas import prepared, rounds_numbers
from gateway.generate.tool_values import form_rule
from gateway.generate.wire import GenerationBody, ResponseFormat, StructuredOutputs
from gateway.http.json_text import check_numbers

ANY_OBJECT = '{"type":"object"}'
NO_SCHEMA = (AttributeError, TypeError, KeyError, ArithmeticError)
"""Exceptions of a schema whose keywords have values of other types."""


def grammar_of(body: GenerationBody) -> Grammar | None:
    """Return the grammar of the answer, or None for free text. Slow for large schemas. Raises InvalidRequestError."""
    return exact_grammar(form_of(body))


def exact_grammar(form: Grammar | None) -> Grammar | None:
    """Return a form, as Lark if it has numbers that the grammar library would round in a JSON schema."""
    if form is None or form.kind != "json" or not rounds_numbers(schema := orjson.loads(form.text)):
        return form
    lark = Lark({})
    try:
        return dataclasses.replace(form, kind="lark", text=lark.whole(form_rule(lark, schema, form.whitespace)))
    except RecursionError as error:
        raise _refusal(form.param, ValueError("it is nested too deeply")) from error
    except ValueError as error:
        raise _refusal(form.param, error) from error
    except NO_SCHEMA as error:
        message = f"'{form.param}' is not a valid JSON schema."
        raise InvalidRequestError(message, param=form.param, code="invalid_value") from error


def form_of(body: GenerationBody) -> Grammar | None:
    """Return the form of the answer as the client wrote it, with a prepared schema. Raises InvalidRequestError."""
    found = [*_from_format(body.response_format), *_from_outputs(body.structured_outputs), *_from_guided(body)]
    if not found:
        return None
    if len(found) > 1:
        message = f"'{found[0].param}' and '{found[1].param}' cannot be used together."
        raise InvalidRequestError(message, param=found[1].param)
    if body.ignore_eos:
        raise InvalidRequestError(f"'ignore_eos' cannot be used with '{found[0].param}'.", param="ignore_eos")
    _check_size(found[0])
    return found[0]


def _check_size(grammar: Grammar) -> None:
    """Refuse a grammar that is too long, before sending it to the engine process, which would refuse it."""
    size = len(grammar.text.encode()) + len((grammar.whitespace or "").encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"'{grammar.param}' cannot be enforced: it is longer than {MAX_GRAMMAR_BYTES // 1024} KiB."
        raise InvalidRequestError(message, param=grammar.param)


def is_structured(body: GenerationBody) -> bool:
    """Return whether the request has a field for structured outputs. Fast."""
    fields = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return any(getattr(body, name) is not None for name in fields)


def _from_format(given: ResponseFormat | None) -> Iterator[Grammar]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield Grammar("json", ANY_OBJECT, param="response_format")
        return
    param = "response_format.json_schema"
    if given.json_schema is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    yield _json(given.json_schema.schema_, None, f"{param}.schema")


def _from_outputs(given: StructuredOutputs | None) -> Iterator[Grammar]:
    if given is None:
        return
    values = {
        "json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar,
        "json_object": given.json_object or None,
    }  # fmt: skip
    found = list(_named(values, "structured_outputs.", given.whitespace_pattern))
    if not found:
        message = "'structured_outputs' must have json, regex, choice, grammar or json_object."
        raise InvalidRequestError(message, param="structured_outputs")
    yield from found


def _from_guided(body: GenerationBody) -> Iterator[Grammar]:
    values = {
        "json": body.guided_json, "regex": body.guided_regex, "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }  # fmt: skip
    yield from _named(values, "guided_", body.guided_whitespace_pattern)


def _named(values: Mapping[str, Any], prefix: str, whitespace: str | None) -> Iterator[Grammar]:
    for name, value in values.items():
        param = prefix + name
        if value is None:
            continue
        if name == "json":
            yield _json(value, whitespace, param)
        elif name == "json_object":
            yield Grammar("json", ANY_OBJECT, whitespace, param)
        elif name == "choice":
            yield Grammar("choice", orjson.dumps(value).decode(), param=param)
        else:
            kind: GrammarKind = "regex" if name == "regex" else "grammar"
            yield Grammar(kind, value, param=param)


def _json(schema: str | dict[str, Any], whitespace: str | None, param: str) -> Grammar:
    """Return the grammar of a schema, which may be sent as text."""
    try:
        ready = prepared(_parse(schema) if isinstance(schema, str) else schema)
    except ValueError as error:
        raise _refusal(param, error) from error
    return Grammar("json", orjson.dumps(ready).decode(), whitespace, param)


def _refusal(param: str, error: ValueError) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' cannot be enforced: {error}.", param=param)


def _parse(text: str) -> Any:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    check_numbers(text.encode(), schema, in_schema=True)
    return schema
