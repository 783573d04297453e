"""What a chat request asks for, read once from its body: messages and variables of the chat template, tools, and the
rules of the answer (parser settings, grammar and budget of reasoning).

The model's `ToolFormat` defines the syntax of calls.
Structured outputs, `response_format` (OpenAI), `structured_outputs` and `guided_*` (vLLM), become a grammar. The engine
decides whether it can enforce the grammar.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.errors import InvalidRequestError
from engine.forms import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, ThinkingBudget, ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.grammars import NO_SCHEMA, Function, exact_grammar, refusal
from gateway.generate.history import arguments_text
from gateway.generate.params import AnswerRules
from gateway.generate.schemas import prepared
from gateway.generate.tool_formats import (
    ANALYSIS,
    END,
    END_THINK,
    FINAL,
    FORMATS,
    START,
    THINK,
    ToolFormat,
    checked_call,
    find_format,
)
from gateway.generate.wire import (
    SWITCHES,
    ChatCompletionRequest,
    ChatMessage,
    GenerationBody,
    NamedToolChoice,
    ResponseFormat,
)
from gateway.http.json_text import check_numbers

ANY_OBJECT = '{"type":"object"}'


def grammar_of(body: GenerationBody) -> Grammar | None:
    """Return the grammar of the answer, or None for free text. Slow for large schemas. Raises InvalidRequestError."""
    return exact_grammar(form_of(body))


def form_of(body: GenerationBody) -> Grammar | None:
    """Return the form of the answer as the client wrote it, with a prepared schema. Raises InvalidRequestError."""
    found = [*_from_format(body.response_format), *_from_fields(body)]
    if not found:
        return None
    if len(found) > 1:
        message = f"'{found[0].param}' and '{found[1].param}' cannot be used together."
        raise InvalidRequestError(message, param=found[1].param)
    form = found[0]
    if body.ignore_eos:
        raise InvalidRequestError(f"'ignore_eos' cannot be used with '{form.param}'.", param="ignore_eos")
    # the engine process would refuse it, too, after it was sent
    if len(form.text.encode()) + len((form.whitespace or "").encode()) > MAX_GRAMMAR_BYTES:
        raise refusal(form.param, f"it is longer than {MAX_GRAMMAR_BYTES // 1024} KiB")
    return form


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


def _from_fields(body: GenerationBody) -> Iterator[Grammar]:
    """Yield the forms in vLLM's fields; the `guided_*` fields are the older ones."""
    if (given := body.structured_outputs) is not None:
        values = {
            "json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar,
            "json_object": given.json_object or None,
        }  # fmt: skip
        if all(value is None for value in values.values()):
            message = "'structured_outputs' must have json, regex, choice, grammar or json_object."
            raise InvalidRequestError(message, param="structured_outputs")
        yield from _named(values, "structured_outputs.", given.whitespace_pattern)
    guided = {name: getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    yield from _named(guided, "guided_", body.guided_whitespace_pattern)


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
        if isinstance(schema, str):
            text, schema = schema, orjson.loads(schema)
            check_numbers(text.encode(), schema, in_schema=True)
        ready = prepared(schema)
    except orjson.JSONDecodeError as error:
        raise refusal(param, f"not JSON: {error}") from error
    except ValueError as error:
        raise refusal(param, error) from error
    return Grammar("json", orjson.dumps(ready).decode(), whitespace, param)


FLAG = "--tool-parser"
BUDGET = "thinking_token_budget"
UNLIMITED = 2**31 - 1
NO_ARGUMENTS = {"type": "object", "properties": {}}
_IN_SYSTEM = re.compile(r"""message(\[['"]tools['"]\]|\.tools\b)""")
"""Matches chat templates that read the tools from a field of the system message."""
_NEXT_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_RESERVED = frozenset(
    {
        "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' rendering that are no variables of the template."""


# Properties of the model


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


def find_marks(tokenizer: Tokenizer) -> ThoughtMarks | None:
    """Return the tokens that delimit reasoning, or None if the model has no reasoning."""
    if not (tokenizer.has_channels or END_THINK in tokenizer.chat_template_text):
        return None
    marks = (ANALYSIS, END) if tokenizer.has_channels else (THINK, END_THINK)
    return ThoughtMarks(*(tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks))


def _switches(template: str) -> list[str]:
    return [name for name in SWITCHES if name in template] if END_THINK in template else []


# Reading of a body


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A chat request as the chat template and the rules of the answer need it."""

    messages: Sequence[dict[str, Any]]
    """For the chat template."""
    tools: Sequence[dict[str, Any]] | None
    """For the chat template; None without tools."""
    options: Mapping[str, Any]
    """Arguments for the rendering of the chat template."""
    texts: Sequence[str]
    """All texts in the messages, and the descriptions of the tools."""
    functions: Sequence[Function]
    """Functions that are offered to the model."""
    called: str | None
    """Name of the function that the answer must call, "" for any, None if the answer need not call."""
    parallel: bool
    """Several calls are allowed."""
    continues: bool
    """The answer continues the last message."""
    budget: int | None
    """Maximum number of reasoning tokens."""
    format: ToolFormat | None
    marks: ThoughtMarks | None
    """Tokens that delimit reasoning; None if the model has no reasoning."""

    @property
    def must_call(self) -> bool:
        return self.called is not None

    @property
    def has_channels(self) -> bool:
        return self.format is not None and self.format.has_channels

    def rules(self, prompt_end: str, special: Mapping[str, int], form: Grammar | None) -> AnswerRules:
        """Return the rules of the answer. `prompt_end`: end of the prompt as text; the others: see `grammar`.

        A grammar applies from the first token, without reasoning; with a budget it applies after reasoning at the
        beginning. A grammar of channels includes the reasoning. Raises InvalidRequestError."""
        parsing, grammar = self._parsing(prompt_end), self.grammar(special, form)
        thinking = self._thinking(parsing, grammar is not None)
        is_bound = grammar is not None and (thinking is not None or form is not None or self.must_call)
        if grammar is None or parsing is None or not is_bound or self.has_channels:
            return AnswerRules(parsing, grammar, thinking)
        if thinking is None:
            return AnswerRules(None if parsing.format is None else parsing, grammar)
        if not thinking.begun and len(thinking.marks.opening) > 1:
            message = (
                f"'{BUDGET}' cannot be used with '{grammar.param}': this model opens reasoning with several tokens."
            )
            raise _unsupported(message, BUDGET)
        return AnswerRules(dataclasses.replace(parsing, once=True), grammar, thinking)

    def _parsing(self, prompt_end: str) -> Parsing | None:
        reasons = self.marks is not None
        if not (self.tools or reasons or self.has_channels):
            return None
        return Parsing(
            self.format if self.tools or self.has_channels else None,
            self.functions,
            reasons,
            reasons and not self.has_channels and prompt_end.rstrip().endswith(THINK),
            self.parallel,
            self.marks,
            opening=FINAL if self.continues else prompt_end.rpartition(START)[2],
        )

    def _thinking(self, parsing: Parsing | None, has_grammar: bool) -> ThinkingBudget | None:
        """Return the budget, or None without a budget or reasoning. If the prompt opens reasoning, an answer with a
        grammar gets an unlimited budget, so that the grammar applies after the reasoning. A grammar of channels
        includes the reasoning and its budget."""
        if parsing is None or parsing.marks is None or (has_grammar and self.has_channels):
            return None
        tokens = self.budget
        if tokens is None and has_grammar and parsing.is_thinking:
            tokens = UNLIMITED
        return None if tokens is None else ThinkingBudget(tokens, parsing.marks, parsing.is_thinking)

    def grammar(self, special: Mapping[str, int], form: Grammar | None = None) -> Grammar | None:
        """Return the grammar for required calls, `strict` functions, or a `form` of the answer, beside which calls are
        allowed; None if none applies.

        `special`: ids of special tokens by text. Raises InvalidRequestError."""
        enforces_calls = self.must_call or any(each.strict for each in self.functions)
        format = self.format
        if format is not None and (enforces_calls or (form is not None and (self.functions or format.has_channels))):
            if not (format.has_channels and self.continues):
                return self._in_format(format, special, form, enforces_calls)
            if enforces_calls:  # the prompt has begun the text
                raise _invalid("'continue_final_message' cannot be used with required or strict calls.", "tools")
        return exact_grammar(form)

    def _in_format(
        self, format: ToolFormat, special: Mapping[str, int], form: Grammar | None, enforces_calls: bool
    ) -> Grammar:
        required, functions = self.must_call, self.functions
        if self.called:
            functions = [each for each in functions if each.name == self.called]
        param = form.param if form is not None and not enforces_calls else "tools"
        try:
            enforced = [
                each._replace(parameters=prepared(each.parameters or NO_ARGUMENTS) if required or each.strict else {})
                for each in functions
            ]
            if form is not None:
                _check_form(form, bool(functions))
            text = format.grammar(enforced, special, self.parallel, required, form, self.budget)
        except (orjson.JSONEncodeError, RecursionError) as error:
            raise _invalid("The parameters of a tool are nested too deeply.", "tools") from error
        except ValueError as error:
            raise _invalid(f"'{param}' cannot be enforced in the format {format.name}: {error}", param) from error
        except NO_SCHEMA as error:
            raise _invalid("The parameters of a tool are not a valid JSON schema.", "tools") from error
        return Grammar("lark", text, param="tools" if form is None else form.param)

    def encode(self, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
        """Return the token ids of the prompt. Slow. Raises InvalidRequestError, and ContextLengthError for long
        texts."""
        tokenizer.check_length(self.texts, max_model_len, "messages")
        return tokenizer.encode_chat(self.messages, tools=self.tools, **self.options)


def read_form(
    body: ChatCompletionRequest,
    format: ToolFormat | None,
    marks: ThoughtMarks | None,
    template: str,
    *,
    generates: bool = True,
) -> AnswerForm:
    """Read and check a body. Slow for large schemas. Raises InvalidRequestError.

    `marks`: tokens that delimit reasoning, if the model has it; `template`: text of the chat template; `generates`:
    False if only the tokens of the prompt are wanted."""
    budget = _budget(body, template, marks is not None)
    if generates and budget is not None and marks is None:
        message = "This model's chat template does not support reasoning; remove 'thinking_token_budget'."
        raise _unsupported(message, BUDGET)
    _check(body)
    functions = [
        Function(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
        for tool in (body.tools or () if body.tool_choice != "none" else ())
    ]
    _check_tools(body, functions, format, template)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if functions else None
    choice = body.tool_choice
    called = choice.function.name if isinstance(choice, NamedToolChoice) else "" if choice == "required" else None
    return AnswerForm(
        _template_messages(body, format, tools if _IN_SYSTEM.search(template) else None),
        tools,
        _template_options(body, template),
        tuple(_texts(body)),
        functions,
        called,
        body.parallel_tool_calls is not False,
        bool(body.continue_final_message),
        budget,
        format,
        marks,
    )


def _budget(body: ChatCompletionRequest, template: str, reasons: bool) -> int | None:
    """Return the maximum number of reasoning tokens. That of other servers applies if the model reasons. The effort
    `none` is a budget of 0 if the template has no switch."""
    if reasons and body.reasoning_effort == "none" and not _switches(template):
        return 0
    budget = body.thinking_token_budget
    return body.other_budget() if budget is None and reasons else budget


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")


def _check(body: ChatCompletionRequest) -> None:
    """Check combinations of fields. Raises InvalidRequestError."""
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise _invalid("'max_tokens' and 'max_completion_tokens' differ; send only one.", "max_tokens")
    for index, message in enumerate(body.messages):
        if message.content is None and message.role not in ("assistant", "tool"):
            param = f"messages[{index}].content"
            raise _invalid(f"'{param}' must not be empty.", param)
    if not body.continue_final_message:
        return
    last = body.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        reason = "'continue_final_message' needs a last message with the role 'assistant', text and no calls."
        raise _invalid(reason, "continue_final_message")
    if body.add_generation_prompt:
        reason = "'add_generation_prompt' cannot be used with 'continue_final_message'."
        raise _invalid(reason, "add_generation_prompt")


def _check_tools(
    body: ChatCompletionRequest, functions: Sequence[Function], format: ToolFormat | None, template: str
) -> None:
    """Raise InvalidRequestError for invalid tools, or if the model does not support tools."""
    if not body.tools and body.tool_choice not in (None, "none") and (body.tools is None or body.tool_choice != "auto"):
        raise _invalid("'tool_choice' is only allowed with 'tools'.", "tool_choice")
    if not functions:
        return
    if "tools" not in template:
        message = "This model's chat template does not support tools; use a --chat-template that does."
        raise _unsupported(message, "tools")
    if format is None:
        raise _unsupported(f"The tool call format of this model is unknown; start the server with {FLAG}.", "tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise _invalid("Two tools have the same name.", "tools")
    if isinstance(body.tool_choice, NamedToolChoice) and body.tool_choice.function.name not in names:
        raise _invalid("'tool_choice' names a function that is not in 'tools'.", "tool_choice.function.name")


def _template_options(body: ChatCompletionRequest, template: str) -> dict[str, Any]:
    """Return the arguments for the rendering of the chat template. An effort that the template does not read is
    ignored, because agents always send one. Raises InvalidRequestError for a reserved name."""
    options = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & options.keys()):
        param = f"chat_template_kwargs.{reserved[0]}"
        raise _invalid(f"'{param}' is no variable of a chat template.", param)
    effort, switches = body.reasoning_effort, _switches(template)
    if effort == "none" and switches:
        options[switches[0]] = False
    elif effort is not None and "reasoning_effort" in template:
        is_known = f"'{effort}'" in template or f'"{effort}"' in template
        options["reasoning_effort"] = effort if is_known else _NEXT_EFFORTS.get(effort, effort)
    options["add_generation_prompt"] = body.add_generation_prompt is not False and not body.continue_final_message
    return options | ({"continue_final_message": True} if body.continue_final_message else {})


def _texts(body: ChatCompletionRequest) -> Iterator[str]:
    """Yield the texts of the messages and the descriptions of the tools."""
    for message in body.messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part.text for part in message.content or ())
        yield from (call.function.arguments for call in message.tool_calls or ())
        yield message.reasoning or message.reasoning_content or ""
    yield from (tool.function.description or "" for tool in body.tools or ())


def _check_form(form: Grammar, offers: bool) -> None:
    """Raise InvalidRequestError for a form that is not JSON if tools are offered, and for a grammar."""
    if offers and form.kind != "json":
        raise _invalid(f"'{form.param}' cannot be used together with 'tools'; only JSON can.", form.param)
    if form.kind != "grammar":
        return
    message = f"'{form.param}' cannot be used with this model, which answers in channels; use JSON, a regex or choices."
    raise _unsupported(message, form.param)


def _template_messages(
    body: ChatCompletionRequest, format: ToolFormat | None, tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the messages for the chat template. `tools`: those to write into the system message, if any."""
    messages = [_template_message(message) for message in body.messages]
    if format is not None:
        format.adapt(messages)
    if tools is not None:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = orjson.dumps([tool["function"] for tool in tools]).decode()
    return messages


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message: role `developer` to `system`, and past reasoning to one name. A message without content gets
    an empty text."""
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
    return fields


def _arguments(text: str) -> str:
    """Return the arguments of a past call as a JSON object, in the client's spelling if they are one."""
    try:
        return checked_call("", text or "{}").arguments
    except ValueError:
        return arguments_text(text)


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_parameter")
