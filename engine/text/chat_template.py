"""Conversion of messages to token ids by the checkpoint's chat template, so that no message can forge a role.

The template runs in transformers' sandbox, in a process with limits (`engine.text.renderer`). If a client's string
contains the text of a control token, the text is marked before rendering, and in the rendered prompt only the
template's own control tokens are encoded as tokens. Conversations without such text are encoded as rendered.
Rendering should run in a thread.

Folding of conversations into a shape that the chat template takes, see `Shape`. Text and its order are kept.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import InvalidRequestError
from engine.text.template_probe import Shape, TemplateFacts

_JOINED = {
    ("system", "system"): Shape.SYSTEMS,
    ("user", "user"): Shape.USERS,
    ("assistant", "assistant"): Shape.ANSWERS,
    ("tool", "user"): Shape.TEXT_AFTER_RESULT,
}
"""Shape that allows a message of the second role to follow one of the first; without it they are joined."""


def fold(messages: Sequence[Mapping[str, Any]], refused: Collection[Shape]) -> Sequence[Mapping[str, Any]]:
    """Return the messages without the refused shapes.

    A system message that the template does not take at its place becomes a user message there, which keeps the prefix
    of the prompt for the cache. Messages that may not follow each other are joined. A message with several calls
    becomes one message per call, each followed by its result. A text before calls becomes a message of its own. For a
    template without tools calls and results become texts.
    """
    if not refused:
        return messages
    turns: list[list[Mapping[str, Any]]] = []
    if Shape.CALL in refused:
        messages = [_without_calls(message) for message in messages]
    if Shape.CALLS in refused:
        messages = list(_one_call_each(messages))
    if Shape.TEXT_WITH_CALL in refused and Shape.ANSWERS not in refused:
        messages = [part for message in messages for part in _text_and_calls(message)]
    for message in messages:
        role = message["role"]
        if role == "system" and _place(turns) in refused:
            role = "user"
        if turns and _JOINED.get((turns[-1][0]["role"], role)) in refused:
            turns[-1].append(message)
        else:
            turns.append([{**message, "role": role}])
    return [_joined(turn) for turn in turns]


def text_of(content: Any) -> str:
    """Return a content as text. Raises InvalidRequestError for a part that is not text."""
    if isinstance(content, list | tuple):
        return "\n".join(map(part_text, content))
    return content or ""


def part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise InvalidRequestError("Only text parts are supported in a message's content.", param="messages")
    return text


def _joined(turn: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the messages of a turn as one, in linear time."""
    if len(turn) == 1:
        return turn[0]
    texts = {
        name: "\n\n".join(filter(None, [text_of(message.get(name)) for message in turn]))
        for name in ("content", "reasoning_content")
    }
    calls = [call for message in turn for call in message.get("tool_calls") or ()]
    parts = {"reasoning_content": texts["reasoning_content"], "tool_calls": calls}
    return {**turn[0], "content": texts["content"], **{name: part for name, part in parts.items() if part}}


def _place(turns: Sequence[Sequence[Mapping[str, Any]]]) -> Shape | None:
    """Return the shape that a system message after these turns needs."""
    if not turns:
        return Shape.SYSTEM
    return None if turns[-1][0]["role"] == "system" else Shape.LATE_SYSTEM


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its calls, or the result of one, as text."""
    text = text_of(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"[result of a tool]\n{text}"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    written = [f"[call of {call['name']}: {call['arguments']}]" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [text, *written]))}


def _text_and_calls(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if not (message.get("tool_calls") and message.get("content")):
        yield message
        return
    yield {name: value for name, value in message.items() if name != "tool_calls"}
    yield {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[Any, list[Mapping[str, Any]]] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            yield {**({"role": "assistant", "content": ""} if number else message), "tool_calls": [call]}
            yield from results.pop(call.get("id"), ())
        for others in results.values():
            yield from others


_MAX_DIGITS = 4000  # of an integer in past calls; Python converts at most 4,300

# Unicode noncharacters, which do not occur in text for interchange.
_STAND_IN, _BREAK, _MARK = "\ufdd0", "\ufdd1", "\ufdd2"
_RESERVED = re.compile("[\ufdd0-\ufdd2]")
_FIRST_STAND_IN = 0xF0000


def encode_text(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Return token ids. Raises InvalidRequestError for `param` if the text has lone surrogates, which are not UTF-8.

    Encodes a batch of one, because before tokenizers 0.23 only batches release the interpreter lock, and a long text
    takes seconds.
    """
    try:
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"'{param}' must be valid Unicode text.", param=param) from error
    return ids


class ChatTemplate:
    """Chat template of a tokenizer. `render(messages, **values)` renders it, and raises InvalidRequestError."""

    def __init__(
        self,
        render: Callable[..., str],
        backend: tokenizers.Tokenizer,
        sources: Mapping[str, str],
        facts: TemplateFacts,
    ) -> None:
        self._render = render
        self.text = "\0".join(sources.values())
        self._backend = backend
        self._facts = facts
        written = "\0".join([*sources.values(), facts.rendered])
        added = backend.get_added_tokens_decoder()
        self._control = {i: token for i, token in added.items() if _is_control(token, written)}
        self._control_pattern = _pattern(self._control.values())
        self._written_ids = frozenset(i for i, token in self._control.items() if token.content in written)
        after = facts.after_answer.lstrip()
        marks = [(token.content, i) for i, token in self._control.items() if after.startswith(token.content)]
        self._end_id = max(marks, key=lambda mark: len(mark[0]), default=("", None))[1]
        self._plain: _PlainTextEncoder | None = None
        self._plain_lock = threading.Lock()
        # Normalised tokens are matched after normalisation, so text that only normalises to one must be detected too.
        self._seen_late = backend.normalizer is not None and any(t.normalized for t in self._control.values())

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequestError if the template refuses it."""
        inputs: dict[str, Any] = {
            "messages": [self._fit(message) for message in fold(messages, self._facts.refused)],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "template_kwargs": template_kwargs,
        }
        marked = any(self._control_pattern.search(text) for text in _strings(inputs))
        if marked:
            inputs = _map_strings(inputs, self._mark)
        options = {"add_generation_prompt": add_generation_prompt, **inputs["template_kwargs"]}
        text = self._render(inputs["messages"], tools=inputs["tools"], **options)
        if marked:
            return self._plain_text_encoder().encode(text)
        ids = encode_text(self._backend, text, add_special_tokens=False, param="messages")
        if self._seen_late and self._holds_late_tokens(text, ids):
            return self._plain_text_encoder().encode(text)
        return ids

    def ends_at(self, ids: frozenset[int]) -> frozenset[int]:
        """Return the end tokens `ids`, with the control token behind an answer if the template writes none of `ids`.

        A template that writes an end token may use the other token inside an answer, such as between two channels.
        """
        return ids if self._end_id is None or ids & self._written_ids else ids | {self._end_id}

    def _mark(self, text: str) -> str:
        return self._control_pattern.sub(lambda match: _MARK + match[0], _RESERVED.sub("\ufffd", text))

    def _holds_late_tokens(self, text: str, ids: list[int]) -> bool:
        return sum(map(self._control.__contains__, ids)) > len(self._control_pattern.findall(text))

    def _plain_text_encoder(self) -> "_PlainTextEncoder":
        with self._plain_lock:  # created on demand, because it holds a second copy of the vocabulary
            if self._plain is None:
                self._plain = _PlainTextEncoder(self._backend, self._control, self._control_pattern)
            return self._plain

    def _fit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message to the form that the template reads: content as string or parts, arguments of calls as
        objects or text, and the content of a message with calls and no text as an empty string or None."""
        fitted = dict(message)
        content = fitted.get("content")
        if isinstance(content, (list, tuple)):
            fitted["content"] = self._fit_parts([part_text(part) for part in content])
        elif isinstance(content, str) and self._facts.reads_parts and not self._facts.reads_strings:
            fitted["content"] = [{"type": "text", "text": content}]
        if fitted.get("tool_calls"):
            convert = _with_text if self._facts.text_arguments else _with_parsed_arguments
            fitted["tool_calls"] = [convert(call) for call in fitted["tool_calls"]]
            fitted["content"] = fitted.get("content") or (None if self._facts.bare_calls else "")
        return fitted

    def _fit_parts(self, texts: list[str]) -> str | list[dict[str, str]]:
        if not self._facts.reads_parts:
            return "\n".join(texts)
        joined = "".join(texts)
        if len(self._control_pattern.findall(joined)) > sum(len(self._control_pattern.findall(t)) for t in texts):
            texts = [joined]  # a control token spans several parts
        return [{"type": "text", "text": text} for text in texts]


class _PlainTextEncoder:
    """Encodes rendered text in which a mark before the text of a control token makes it plain text.

    It holds a copy of the tokenizer without the control tokens. Stand-ins of reserved characters replace the control
    tokens that the template wrote, so that other behaviour of the tokenizer (next to special tokens, at the start,
    between words) is unchanged.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Mapping[int, AddedToken], pattern: re.Pattern[str]
    ) -> None:
        names = {token.content for token in control.values()}
        layout = json.loads(backend.to_str())
        layout["added_tokens"] = [token for token in layout["added_tokens"] if token["content"] not in names]
        layout |= {"post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(layout))
        stand_ins = {i: _STAND_IN + chr(_FIRST_STAND_IN + n) for n, i in enumerate(control)}
        self._tokenizer.add_special_tokens([_like(control[i], name) for i, name in stand_ins.items()])
        self._tokenizer.add_special_tokens([AddedToken(_BREAK, normalized=False, special=True)])
        self._stand_in_of = {control[i].content: name for i, name in stand_ins.items()}
        self._ids = {self._id_of(token["content"]): token["id"] for token in layout["added_tokens"]}
        self._ids |= {self._id_of(name): i for i, name in stand_ins.items()}
        self._break_id = self._id_of(_BREAK)
        self._pattern = re.compile(f"({_MARK}?)({pattern.pattern})")
        # Ids by which the model itself could spell a control token (Unigram vocabularies contain them as pieces),
        # except the id of unknown characters.
        model = layout["model"]
        unknown = {model.get("unk_id"), self._tokenizer.token_to_id(model.get("unk_token") or "")}
        self._forgeable = {i for name in names if (i := self._tokenizer.token_to_id(name)) is not None} - unknown

    def _id_of(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        assert found is not None, "an added token of the copy must have an id"
        return int(found)

    def encode(self, rendered: str) -> list[int]:
        """Return token ids. Raises InvalidRequestError if marked text cannot be spelled without its token."""
        ids = self._encode(rendered, "")
        if not self._forgeable.isdisjoint(ids):
            ids = self._encode(rendered, _BREAK)
            if not self._forgeable.isdisjoint(ids):
                raise InvalidRequestError("The messages contain a control token of the model.", param="messages")
        return [self._ids.get(i, i) for i in ids if i != self._break_id]

    def _encode(self, rendered: str, separator: str) -> list[int]:
        def place(match: re.Match[str]) -> str:
            mark, token = match[1], match[2]
            return token[0] + separator + token[1:] if mark else self._stand_in_of[token]

        text = self._pattern.sub(place, rendered).replace(_MARK, "")
        return encode_text(self._tokenizer, text, add_special_tokens=False, param="messages")


def _is_control(token: AddedToken, written: str) -> bool:
    """Return whether a token is special or written by the template; white space (Gemma's newlines) is ordinary."""
    return bool(token.content.strip()) and (token.special or token.content in written)


def _pattern(control: Collection[AddedToken]) -> re.Pattern[str]:
    """Return a pattern of all control tokens, the longest first.

    Common prefixes are merged. Vocabularies have up to thousands of tokens with the same beginning, and every `<|` in a
    text would otherwise be compared with each.
    """
    if any(token.single_word for token in control):
        longest_first = sorted(control, key=lambda token: len(token.content), reverse=True)
        return re.compile("|".join(_token_pattern(token) for token in longest_first))
    return re.compile(_any_of([token.content for token in control]) if control else "(?!)")


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression for any of the texts that prefers the longest match."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text[1:])
    ends = tails.pop("", None) is not None
    branches = [_branch(first, rest) for first, rest in tails.items()]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}" if branches else ""


def _branch(first: str, tails: list[str]) -> str:
    """Return a regular expression for texts that begin with the same character, with their common prefix factored."""
    least, most = min(tails), max(tails)  # any prefix common to these two is common to all
    size = next((at for at, char in enumerate(least) if most[at : at + 1] != char), len(least))
    return re.escape(first + least[:size]) + _any_of([tail[size:] for tail in tails])


def _token_pattern(token: AddedToken) -> str:
    text = re.escape(token.content)
    return rf"(?<!\w){text}(?!\w)" if token.single_word else text


def _like(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special)


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON-like value, including keys."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _with_text(call: Any) -> Any:
    """Return a call with its arguments as text, in the client's spelling if they are text already."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_parsed_arguments(call: Any) -> Any:
    """Parse the arguments of a call, which OpenAI sends as a JSON string and most templates expect as an object. A
    number that Python cannot represent becomes a string of its digits."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"], parse_int=_integer, parse_float=_real)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MAX_DIGITS else digits


def _real(digits: str) -> float | str:
    return value if math.isfinite(value := float(digits)) else digits


_DEEPSEEK_V31 = """
{%- if tools %}
  {%- set section = namespace(text="## Tools\\nYou have access to the following tools:\\n") %}
  {%- for tool in tools %}
    {%- set section.text = section.text + "\\n### " + tool.function.name %}
    {%- set section.text = section.text + "\\nDescription: " + (tool.function.description or "") %}
    {%- set section.text = section.text + "\\n\\nParameters: " + (tool.function.parameters or {}) | tojson + "\\n" %}
  {%- endfor %}
  {%- set section.text = section.text + "\\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\\n"
    + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    + "{additional_tool_calls}<｜tool▁calls▁end｜>\\n\\nWhere:\\n"
    + "- `tool_call_name` must be an exact match to one of the available tools\\n"
    + "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\\n"
    + "- For multiple tool calls, chain them directly without separators or spaces\\n" %}
  {%- set has_system = messages[0].role == "system" %}
  {%- set text = (messages[0].content + "\\n\\n" if has_system else "") + section.text %}
  {%- set messages = [{"role": "system", "content": text}] + (messages[1:] if has_system else messages) %}
{%- endif %}"""
"""The section as documented for DeepSeek-V3.1, behind the system message."""
_IS_V31 = re.compile(r"""<｜tool▁call▁begin｜>["']\s*\+\s*tool\[.function.\]\[.name.\]""")


def complete(template: str) -> str:
    """Return the template with a tools section if it needs one."""
    return _DEEPSEEK_V31 + template if _IS_V31.search(template) and "tools" not in template else template
