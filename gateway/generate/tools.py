"""Tools of a chat request: input of the chat template, parser settings, and the grammar for enforced calls.

The model's `ToolFormat` defines the syntax of calls."""

import json
import math
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from engine.errors import InvalidRequestError
from engine.forms import Grammar
from engine.text.thoughts import ThoughtMarks
from gateway.generate.answer_parser import Parsing
from gateway.generate.lark import Lark
from gateway.generate.schemas import prepared
from gateway.generate.tool_formats import FORMATS, THINK, ToolFormat, find_format
from gateway.generate.tool_grammars import Function
from gateway.generate.tool_values import form_rule
from gateway.generate.wire import ChatCompletionRequest, ChatMessage, NamedToolChoice

FLAG = "--tool-parser"
_IN_SYSTEM = re.compile(r"""message(\[['"]tools['"]\]|\.tools\b)""")
"""Matches chat templates that read the tools from a field of the system message."""

NO_ARGUMENTS = {"type": "object", "properties": {}}
_MAX_DIGITS = 4000
"""Maximum length of an integer in past calls; Python converts at most 4,300 digits."""


def choose_format(name: str, template: str, own: str = "") -> ToolFormat | None:
    """Return the tool call format `name`; for "auto" detect it from the checkpoint's own parser description (`own`,
    with regular expressions), else from the chat template."""
    return find_format(own.replace("\\", "")) or find_format(template) if name == "auto" else FORMATS[name]


def offers_tools(body: ChatCompletionRequest) -> bool:
    """Return whether the request offers tools to the model."""
    return bool(body.tools) and body.tool_choice != "none"


def offered_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Return the tools for the chat template, or None without tools. Slow for large schemas."""
    if not offers_tools(body):
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def check_tools(body: ChatCompletionRequest, format: ToolFormat | None, template: str) -> None:
    """Raise InvalidRequestError for invalid tools, or if the model does not support tools."""
    if not body.tools and body.tool_choice not in (None, "none"):
        raise _invalid("'tool_choice' is only allowed with 'tools'.", "tool_choice")
    if not offers_tools(body):
        return
    if "tools" not in template:
        raise _unsupported("This model's chat template does not support tools.", "tools")
    if format is None:
        message = f"The tool call format of this model is unknown; start the server with {FLAG}."
        raise _unsupported(message, "tools")
    names = [function.name for function in _functions(body)]
    if len(set(names)) < len(names):
        raise _invalid("Two tools have the same name.", "tools")
    if isinstance(body.tool_choice, NamedToolChoice) and body.tool_choice.function.name not in names:
        raise _invalid("'tool_choice' names a function that is not in 'tools'.", "tool_choice.function.name")


def parsing_of(
    body: ChatCompletionRequest, format: ToolFormat | None, marks: ThoughtMarks | None, prompt_end: str
) -> Parsing | None:
    """Return the parser settings, or None if answers are plain text. `marks`: tokens that delimit reasoning, if the
    model has it; `prompt_end`: end of the prompt as text."""
    offers, reasons = offers_tools(body), marks is not None
    if not offers and not reasons:
        return None
    return Parsing(
        format if offers else None,
        _functions(body) if offers else (),
        reasons,
        reasons and prompt_end.rstrip().endswith(THINK),
        body.parallel_tool_calls is not False,
        marks,
    )


def tool_grammar(
    body: ChatCompletionRequest, format: ToolFormat | None, special: Mapping[str, int], form: Grammar | None = None
) -> Grammar | None:
    """Return the grammar for required calls, `strict` functions, or calls beside a `form` of the answer; None if none
    applies.

    `special`: ids of special tokens by text. Raises InvalidRequestError."""
    functions = _functions(body)
    required = must_call(body)
    if not (required or form is not None or any(each.strict for each in functions)):
        return None
    assert format is not None
    if isinstance(body.tool_choice, NamedToolChoice):
        functions = [each for each in functions if each.name == body.tool_choice.function.name]
    try:
        enforced = [_enforced(each) if required or each.strict else each._replace(parameters={}) for each in functions]
        write = None if form is None else _form_writer(form)
        text = format.grammar(enforced, special, body.parallel_tool_calls is not False, required, write)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise _invalid("The parameters of a tool are nested too deeply.", "tools") from error
    except ValueError as error:
        raise _invalid(f"'tools' cannot be enforced in the format {format.name}: {error}", "tools") from error
    except (AttributeError, TypeError) as error:
        raise _invalid("The parameters of a tool are not a valid JSON schema.", "tools") from error
    return Grammar("lark", text, param="tools" if form is None else form.param)


def _form_writer(form: Grammar) -> Callable[[Lark], str]:
    """Return a function that writes the rule of a form. Raises InvalidRequestError if it is not JSON."""
    if form.kind != "json":
        raise _invalid(f"'{form.param}' cannot be used together with 'tools'; only JSON can.", form.param)
    return lambda lark: form_rule(lark, orjson.loads(form.text), form.whitespace)


def template_messages(body: ChatCompletionRequest, format: ToolFormat | None, template: str) -> list[dict[str, Any]]:
    """Return the messages for the chat template. Raises InvalidRequestError for invalid arguments of past calls."""
    id_chars = None if format is None else format.id_chars
    messages = [_template_message(message, index, id_chars) for index, message in enumerate(body.messages)]
    if format is not None and format.numbers_ids:
        _number_ids(messages)
    tools = offered_tools(body) if _IN_SYSTEM.search(template) else None
    if tools is not None:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = orjson.dumps([tool["function"] for tool in tools]).decode()
    return messages


def _template_message(message: ChatMessage, index: int, id_chars: int | None) -> dict[str, Any]:
    """Convert a message: role `developer` to `system`, arguments of past calls to objects, past reasoning to one name,
    and call ids to the length that the template requires. A message without content and calls gets an empty text."""
    fields = message.model_dump(exclude_none=True, exclude={"refusal", "reasoning"})
    if not message.tool_calls:
        fields.pop("tool_calls", None)
        fields.setdefault("content", "")
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.role == "developer":
        fields["role"] = "system"
    for number, call in enumerate(fields.get("tool_calls", ())):
        param = f"messages[{index}].tool_calls[{number}].function.arguments"
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], param)
        call["id"] = _short(call["id"], id_chars)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = _short(message.tool_call_id, id_chars)
    return fields


def _number_ids(messages: list[dict[str, Any]]) -> None:
    """Replace the ids of calls and results by functions.NAME:NUMBER, numbered through the conversation."""
    names: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            numbered = f"functions.{call['function']['name']}:{number}"
            names[call["id"]], call["id"] = numbered, numbered
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = names.get(message["tool_call_id"], message["tool_call_id"])


def _short(call_id: str, size: int | None) -> str:
    """Return a hexadecimal digest of a call id with `size` characters."""
    return call_id if size is None else blake2b(call_id.encode(), digest_size=size).hexdigest()[:size]


def _arguments(text: str, param: str) -> Mapping[str, Any]:
    """Parse the arguments of a past call; a number that Python cannot represent becomes a string of its digits."""
    try:
        value = json.loads(text or "{}", parse_int=_integer, parse_float=_real, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _invalid(f"'{param}' must be a JSON object as text.", param)
    return value


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MAX_DIGITS else digits


def _real(digits: str) -> float | str:
    return value if math.isfinite(value := float(digits)) else digits


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _functions(body: ChatCompletionRequest) -> list[Function]:
    return [
        Function(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
        for tool in body.tools or ()
    ]


def _enforced(function: Function) -> Function:
    """Return a function with a schema for grammars. Raises ValueError."""
    return function._replace(parameters=prepared(function.parameters or NO_ARGUMENTS))


def must_call(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_value")


def _unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
