"""Tools of a chat request: input of the chat template, parser settings, and the grammar for enforced calls.

The model's `ToolFormat` defines the syntax of calls."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from engine.errors import InvalidRequestError
from engine.forms import Grammar, ThoughtMarks
from engine.text.folding import text_of
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.channels import FINAL, START
from gateway.generate.history import arguments_text
from gateway.generate.lark import Lark, quoted
from gateway.generate.schemas import prepared
from gateway.generate.structured import NO_SCHEMA, exact_grammar
from gateway.generate.tool_decoders import checked_call
from gateway.generate.tool_formats import FORMATS, THINK, ToolFormat, find_format
from gateway.generate.tool_grammars import Function
from gateway.generate.tool_values import form_rule
from gateway.generate.wire import ChatCompletionRequest, ChatMessage, NamedToolChoice

FLAG = "--tool-parser"
_IN_SYSTEM = re.compile(r"""message(\[['"]tools['"]\]|\.tools\b)""")
"""Matches chat templates that read the tools from a field of the system message."""
_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
"""Matches the parts of a regular expression that need care between slashes."""

NO_ARGUMENTS = {"type": "object", "properties": {}}


def choose_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the tool call format `name`; for "auto" detect it from the special tokens, else from the checkpoint's own
    parser description, which has regular expressions, else from the chat template."""
    if name == "auto" and tokenizer.has_channels:
        return FORMATS["harmony"]
    texts = (tokenizer.call_template.replace("\\", ""), tokenizer.chat_template_text)
    found = next(filter(None, map(find_format, texts)), None) if name == "auto" else FORMATS[name]
    if (
        found is None
        or found.is_special
        or tokenizer.special_tokens.keys().isdisjoint((found.calls.mark, found.closes))
    ):
        return found
    return dataclasses.replace(found, is_special=True)  # some checkpoints declare ordinary marks as special


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
    if not body.tools and body.tool_choice not in (None, "none") and (body.tools is None or body.tool_choice != "auto"):
        raise _invalid("'tool_choice' is only allowed with 'tools'.", "tool_choice")
    if not offers_tools(body):
        return
    if "tools" not in template:
        message = "This model's chat template does not support tools; use a --chat-template that does."
        raise _unsupported(message, "tools")
    if format is None:
        raise _unsupported(f"The tool call format of this model is unknown; start the server with {FLAG}.", "tools")
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
    has_channels = format is not None and format.has_channels
    if not (offers or reasons or has_channels):
        return None
    return Parsing(
        format if offers or has_channels else None,
        _functions(body),
        reasons,
        reasons and not has_channels and prompt_end.rstrip().endswith(THINK),
        body.parallel_tool_calls is not False,
        marks,
        opening=FINAL if body.continue_final_message else prompt_end.rpartition(START)[2],
    )


def answer_grammar(
    body: ChatCompletionRequest, format: ToolFormat | None, special: Mapping[str, int], form: Grammar | None = None
) -> Grammar | None:
    """Return the grammar for required calls, `strict` functions, or a `form` of the answer, beside which calls are
    allowed; None if none applies.

    `special`: ids of special tokens by text. Raises InvalidRequestError."""
    functions = _functions(body)
    required = must_call(body)
    enforces_calls = required or any(each.strict for each in functions)
    has_channels = format is not None and format.has_channels
    if format is None or not (enforces_calls or (form is not None and (functions or has_channels))):
        return exact_grammar(form)
    if has_channels and body.continue_final_message:  # the prompt has begun the text
        if enforces_calls:
            raise _invalid("'continue_final_message' cannot be used with required or strict calls.", "tools")
        return exact_grammar(form)
    if isinstance(body.tool_choice, NamedToolChoice):
        functions = [each for each in functions if each.name == body.tool_choice.function.name]
    param = form.param if form is not None and not enforces_calls else "tools"
    try:
        enforced = [_enforced(each) if required or each.strict else each._replace(parameters={}) for each in functions]
        write = None if form is None else _form_writer(form, bool(functions))
        parallel, budget = body.parallel_tool_calls is not False, body.thinking_token_budget
        text = format.grammar(enforced, special, parallel, required, write, budget)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise _invalid("The parameters of a tool are nested too deeply.", "tools") from error
    except ValueError as error:
        raise _invalid(f"'{param}' cannot be enforced in the format {format.name}: {error}", param) from error
    except NO_SCHEMA as error:
        raise _invalid("The parameters of a tool are not a valid JSON schema.", "tools") from error
    return Grammar("lark", text, param="tools" if form is None else form.param)


def _form_writer(form: Grammar, offers: bool) -> Callable[[Lark], str]:
    """Return a function that writes the rule of a form. Raises InvalidRequestError if it is not JSON and tools are
    offered, or if it is a grammar."""
    if form.kind == "json":
        return lambda lark: form_rule(lark, orjson.loads(form.text), form.whitespace)
    if offers:
        raise _invalid(f"'{form.param}' cannot be used together with 'tools'; only JSON can.", form.param)
    if form.kind == "choice":
        return lambda lark: lark.terminal(" | ".join(map(quoted, orjson.loads(form.text))))
    if form.kind == "regex":
        return lambda lark: lark.terminal(f"/{_SLASH.sub(_escaped, form.text)}/")
    message = f"'{form.param}' cannot be used with this model, which answers in channels; use JSON, a regex or choices."
    raise _unsupported(message, form.param)


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def template_messages(body: ChatCompletionRequest, format: ToolFormat | None, template: str) -> list[dict[str, Any]]:
    """Return the messages for the chat template."""
    id_chars = None if format is None else format.id_chars
    messages = [_template_message(message, id_chars) for message in body.messages]
    if format is not None and format.has_channels:
        for message in messages:
            _name_thoughts(message)
    if format is not None and format.numbers_ids:
        _number_ids(messages)
    tools = offered_tools(body) if _IN_SYSTEM.search(template) else None
    if tools is not None:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = orjson.dumps([tool["function"] for tool in tools]).decode()
    return messages


def _template_message(message: ChatMessage, id_chars: int | None) -> dict[str, Any]:
    """Convert a message: role `developer` to `system`, past reasoning to one name, and call ids to the length that the
    template requires. A message without content gets an empty text."""
    fields = message.model_dump(exclude_none=True, exclude={"refusal", "reasoning"})
    if not message.tool_calls:
        fields.pop("tool_calls", None)
    fields.setdefault("content", "")
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        call["id"] = _short(call["id"], id_chars)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = _short(message.tool_call_id, id_chars)
    return fields


def _name_thoughts(message: dict[str, Any]) -> None:
    """Rename the reasoning as gpt-oss's template reads it. The template takes no text beside it in a message with calls
    and writes a lone text as reasoning, so both become one text."""
    thoughts = message.pop("reasoning_content", None)
    if thoughts and message.get("tool_calls") and message.get("content"):
        thoughts = f"{thoughts}\n\n{text_of(message.pop('content'))}"
    if thoughts:
        message["thinking"] = thoughts


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


def _arguments(text: str) -> str:
    """Return the arguments of a past call as a JSON object, in the client's spelling if they are one."""
    try:
        return checked_call("", text or "{}").arguments
    except ValueError:
        return arguments_text(text)


def _functions(body: ChatCompletionRequest) -> list[Function]:
    """Return the functions that are offered to the model."""
    return [
        Function(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
        for tool in (body.tools or () if offers_tools(body) else ())
    ]


def _enforced(function: Function) -> Function:
    """Return a function with a schema for grammars. Raises ValueError."""
    return function._replace(parameters=prepared(function.parameters or NO_ARGUMENTS))


def must_call(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
