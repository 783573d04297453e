"""The harmony format of gpt-oss: an answer consists of messages in channels.

A message is `<|start|>` header `<|message|>` text `<|end|>`. The header names the role, the channel and, for a call,
the recipient, e.g. `assistant<|channel|>commentary to=functions.NAME <|constrain|>json`. The prompt ends with
`<|start|>assistant`; `<|return|>` or `<|call|>` end the answer. The channel `analysis` holds reasoning, `final` the
answer, and `commentary` calls and texts before calls. Source: docs/format.md in the repository openai/harmony.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

from gateway.generate.deltas import Marks, ParsedText
from gateway.generate.lark import Lark
from gateway.generate.tool_decoders import Call, checked_call
from gateway.generate.tool_grammars import Function

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
STOPS = ("<|return|>", "<|call|>")
"""Special tokens that end an answer."""
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALLING = "<|channel|>commentary to=functions."
MAX_HEADER_CHARS = 256
"""Maximum length of a header; a longer one is emitted as text."""
_COMMENTARY = "<|channel|>commentary<|message|>"
_NEXT = "<|end|><|start|>assistant"
_GAP = "\n\n"  # between messages of the same kind
_ROLE = re.compile(r"^\s*assistant\b")
_NAME = re.compile(r"<\|channel\|>\s*(analysis|commentary|final|\w+)\s*")
_PEOPLE = ("", "user", "assistant", "all")  # recipients of messages that are no calls
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def channel_rule(lark: Lark, calls: str, form: Callable[[Lark], str] | None, required: bool, budget: int | None) -> str:
    """Return an expression for an answer.

    `calls`: expression for a call, "" without tools; `form`: writes the rule of the final text; `required`: the answer
    must call; `budget`: maximum number of reasoning tokens.
    """
    anything, following = lark.terminal("/(?s:.)*/"), lark.text(_NEXT)
    limit = "" if budget is None else f"[max_tokens={budget}]"
    thought = f"{lark.text(ANALYSIS)} {lark.rule(anything, limit)} {following}"
    thoughts = "" if budget == 0 else f"({thought}){'*' if budget is None else '?'}"
    if required:
        return f"{thoughts} {calls}"
    final = f"{lark.text(FINAL)} {anything if form is None else form(lark)}"
    if form is not None:  # a text before the form would be part of the answer
        return f"{thoughts} ({calls} | {final})" if calls else f"{thoughts} {final}"
    said = f"{lark.text(_COMMENTARY)} {anything}"
    before = f"({said} {following} | {thought})*" if budget is None else f"{thoughts} ({said} {following})*"
    return f"{before} ({calls} | {final} | {said})"


def decode_channel(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode name `<|message|>` arguments."""
    name, _, arguments = text.partition(MESSAGE)
    return [checked_call(name, arguments.strip() or "{}")]


class _Region(Enum):
    HEADER = auto()
    SAID = auto()
    THOUGHT = auto()
    CALL = auto()


class ChannelParser:
    """Incremental parser of an answer in channels, see `AnswerParser`.

    In a message without `<|message|>`, the text follows the channel. A call that is not offered or invalid is text with
    its header. `opening`: the message that the prompt begins.
    """

    def __init__(self, functions: Mapping[str, Function], parallel: bool, opening: str, max_call_chars: int) -> None:
        self._functions, self._parallel, self._max_call_chars = functions, parallel, max_call_chars
        self._marks = Marks(START, CHANNEL, MESSAGE, END, *STOPS)
        self._tail = ""  # possible beginning of a mark
        self._held: list[str] = []  # a header, or the arguments of a call
        self._name = self._header = ""  # of the current message
        self._has_called = False
        self._texts: dict[_Region, list[str]] = {_Region.SAID: [], _Region.THOUGHT: []}
        self._gaps = dict.fromkeys(self._texts, "")  # text before the next text
        self._spoken: set[_Region] = set()  # regions with text
        self._calls: list[Call] = []
        self._begin(_Region.HEADER, MAX_HEADER_CHARS)
        if CHANNEL in opening:
            self.push(opening)
            self._spoken.clear()
            self._gaps = dict.fromkeys(self._texts, "")

    def push(self, text: str, final: bool = False) -> ParsedText:
        """Parse more text; `final`: the answer ends, so emit all held-back text."""
        text, at = self._tail + text, 0
        while (mark := self._marks.find(text, at, len(text))) is not None:
            self._add(text[at : mark.start()])
            self._cross(mark[0])
            at = mark.end()
        end = len(text) if final else self._marks.begin(text, at)
        self._add(text[at:end])
        self._tail = text[end:]
        if final:
            self._close()
        said, thoughts = ("".join(texts) for texts in self._texts.values())
        piece = ParsedText(said, thoughts, self._calls)
        self._texts, self._calls = {region: [] for region in self._texts}, []
        return piece

    def _begin(self, region: _Region, room: int = 0) -> None:
        self._region, self._room = region, room
        self._held = []

    def _add(self, text: str) -> None:
        """Add text to the current region. A header or call that becomes too long is text."""
        if self._region in self._texts:
            self._emit(self._region, text)
            return
        self._held.append(text)
        self._room -= len(text)
        if self._room < 0:
            header = self._header if self._region is _Region.CALL else ""
            self._emit(_Region.SAID, header + "".join(self._held))
            self._begin(_Region.SAID)

    def _emit(self, region: _Region, text: str) -> None:
        if text:
            self._texts[region] += (self._gaps[region], text)
            self._gaps[region] = ""
            self._spoken.add(region)

    def _cross(self, mark: str) -> None:
        """Handle a mark: it continues a header, or ends a header or a message."""
        is_header = self._region is _Region.HEADER
        if is_header and mark == MESSAGE:
            self._open("".join(self._held))
        elif mark == MESSAGE or (is_header and mark == CHANNEL):
            self._add(mark)
        else:
            self._close()
            self._begin(_Region.HEADER, MAX_HEADER_CHARS)
            if mark == CHANNEL:
                self._add(mark)

    def _open(self, header: str) -> None:
        """Begin the text of a message."""
        recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
        self._name = "" if recipient is None else recipient[1].removeprefix("functions.")
        self._header = _ROLE.sub("", header, 1) + MESSAGE
        if self._name in self._functions:
            self._begin(_Region.CALL, self._max_call_chars)
        elif channel is not None and channel[1] == "analysis":
            self._begin(_Region.THOUGHT)
        else:
            self._begin(_Region.SAID)
            if self._name not in _PEOPLE:
                self._emit(_Region.SAID, self._header)

    def _close(self) -> None:
        """End the current header or message; the next text is separated from this one."""
        if self._region is _Region.HEADER:
            self._close_header("".join(self._held))
        elif self._region is _Region.CALL:
            self._close_call("".join(self._held))
        for region in self._spoken:
            self._gaps[region] = _GAP

    def _close_header(self, header: str) -> None:
        """Emit the text of a message without `<|message|>`."""
        rest = _ROLE.sub("", header, 1)
        channel = _NAME.match(rest)
        text = rest if channel is None else rest[channel.end() :]
        if text.strip():
            self._emit(_Region.THOUGHT if channel and channel[1] == "analysis" else _Region.SAID, text)

    def _close_call(self, arguments: str) -> None:
        try:
            calls = decode_channel(self._name + MESSAGE + arguments, self._functions)
        except ValueError:
            self._emit(_Region.SAID, self._header + arguments)
            return
        if self._parallel or not self._has_called:
            self._calls += calls
        self._has_called = True
