"""Incremental parser of model output into text, reasoning and tool calls.

Clients influence the model's output, so each step takes time linear in the new text, and held-back text is bounded: a
partial mark, MAX_BLANKS characters of white space, MAX_CALL_CHARS characters of a call. The total result does not
depend on how the text is split into pieces. Text that looks like a call but is invalid is emitted unchanged.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.api import TokenLogprobs
from engine.forms import ThoughtMarks
from engine.text.thoughts import ThoughtTracker
from gateway.generate.grammars import Function
from gateway.generate.tool_formats import (
    CHANNEL,
    END,
    END_THINK,
    MESSAGE,
    START,
    STOPS,
    THINK,
    Call,
    ToolFormat,
    decode_channel,
)


@dataclass(slots=True)
class ParsedText:
    """Parsed output of one `push`."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.reasoning or self.calls)


@dataclass(slots=True)
class OutputDelta:
    """New output of one choice."""

    index: int
    """Index of the choice."""
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()
    """Visible tokens with their logprobs."""
    finish_reason: str | None = None
    """Set on the last delta of the choice."""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    """Complete tool calls."""
    stop: str | None = None
    """The stop string that ended the choice, if any."""
    embedding: bytes = b""
    """The vector of an embedding request, or the scores of the prompt (`Pooling.SCORES`), float32 little-endian."""


class Marks:
    """The marks that end a region of an answer."""

    def __init__(self, *marks: str) -> None:
        self._marks = [mark for mark in marks if mark]
        self._pattern = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
        self.longest = max(map(len, self._marks), default=0)

    def find(self, text: str, start: int, stop: int) -> re.Match[str] | None:
        return None if self._pattern is None else self._pattern.search(text, start, stop)

    def begin(self, text: str, start: int) -> int:
        """Return the position of a partial mark at the end of the text, or the length of the text."""
        first = len(text)
        for mark in self._marks:
            at = text.find(mark[0], max(start, len(text) - len(mark) + 1))
            while at >= 0 and not mark.startswith(text[at:]):
                at = text.find(mark[0], at + 1)
            first = first if at < 0 else min(first, at)
        return first


MAX_HEADER_CHARS = 256
"""Maximum length of a header; a longer one is emitted as text."""
_GAP = "\n\n"  # between messages of the same kind
_ROLE = re.compile(r"^\s*assistant\b")
_NAME = re.compile(r"<\|channel\|>\s*(analysis|commentary|final|\w+)\s*")
_PEOPLE = ("", "user", "assistant", "all")  # recipients of messages that are no calls
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Region(Enum):
    """Kind of the current text. START: no text yet, and reasoning is only allowed at the beginning."""

    START = auto()
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


MAX_BLANKS = 256
"""Maximum white space in characters that is dropped next to reasoning and calls; the excess is emitted as text."""
MAX_CALL_CHARS = 2**19
"""Maximum length of a call; longer text between the marks is emitted as text."""


@dataclass(frozen=True, slots=True)
class Parsing:
    """Parser settings for the answers of one request."""

    format: ToolFormat | None = None
    """Tool call format; None if no tools are offered."""
    functions: Sequence[Function] = ()
    reasons: bool = False
    """The model may write reasoning."""
    is_thinking: bool = False
    """The prompt ends with the mark that opens reasoning."""
    parallel: bool = True
    """Several calls are allowed."""
    marks: ThoughtMarks | None = None
    """Tokens that delimit reasoning."""
    once: bool = False
    """Reasoning is only allowed at the beginning of the answer."""
    opening: str = ""
    """For a format with channels: the message that the prompt begins."""

    def parser(self) -> "AnswerParser | ChannelParser":
        if self.has_channels:
            functions = {each.name: each for each in self.functions}
            return ChannelParser(functions, self.parallel, self.opening, MAX_CALL_CHARS)
        return AnswerParser(self)

    def tracker(self) -> ThoughtTracker | None:
        """Return a counter of reasoning tokens, or None if the model has no reasoning."""
        return None if self.marks is None else ThoughtTracker(self.marks, self.is_thinking, self.once)

    @property
    def has_channels(self) -> bool:
        return self.format is not None and self.format.has_channels

    @property
    def shows_special_tokens(self) -> bool:
        return self.format is not None and self.format.is_special


class _Edges:
    """Hold back trailing white space until other text follows. `leading`: drop white space at the beginning."""

    def __init__(self, leading: bool = False) -> None:
        self._drops = leading
        self.held = ""

    def add(self, text: str) -> str:
        """Return the text that can be emitted now."""
        text = text.lstrip() if self._drops else self.held + text
        self._drops = self._drops and not text
        end = max(len(text.rstrip()), len(text) - MAX_BLANKS)
        self.held = text[end:]
        return text[:end]


class AnswerParser:
    """Parser of one answer. Do not push after the final text."""

    def __init__(self, parsing: Parsing) -> None:
        form = parsing.format
        self._parsing = parsing
        self._functions: Mapping[str, Function] = {each.name: each for each in parsing.functions}
        self._call_mark, self._bare = ("", "") if form is None else (form.calls.mark, form.bare)
        thinks_later = parsing.reasons and not parsing.once
        self._ends = {
            _Region.SAID: Marks(THINK if thinks_later else "", self._call_mark, self._bare),
            _Region.THOUGHT: Marks(END_THINK),
            _Region.CALL: Marks("" if form is None else form.closes),
        }
        self._region = _Region.START if parsing.reasons and parsing.once else _Region.SAID
        if parsing.is_thinking:
            self._region = _Region.THOUGHT
        self._tail = ""  # possible beginning of a mark
        self._lead = "" if form is not None and form.calls.leads else None  # text before possible leading calls
        self._said, self._thought = _Edges(), _Edges(leading=True)
        self._has_thought = self._has_called = False
        self._opening = ""  # mark that opened the current call
        self._body: list[str] = []
        self._room = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def push(self, text: str, final: bool = False) -> ParsedText:
        """Parse more text; `final`: the answer ends, so emit all held-back text."""
        text, at = self._tail + text, 0
        if self._region is _Region.START:
            at = self._start(text, final)
        while self._region is not _Region.START:
            region, ends, stop = self._region, self._ends[self._region], len(text)
            if region is _Region.CALL:
                stop = min(stop, at + self._room + max(1, ends.longest))
            mark = ends.find(text, at, stop)
            end = stop if final or stop < len(text) else ends.begin(text, at)
            if mark is not None:
                end = mark.start()
            at = self._add(text, at, end)
            if self._region is not region:
                continue
            if mark is None:
                break
            self._cross(mark[0])
            at = mark.end()
        self._tail = text[at:]
        if final:
            self._finish()
        return self._piece()

    def _start(self, text: str, final: bool) -> int:
        """Determine whether the answer begins with reasoning, once possible; return the start of the next region."""
        if text.startswith(THINK):
            self._region = _Region.THOUGHT
            return len(THINK)
        if final or not THINK.startswith(text):
            self._region = _Region.SAID
        return 0

    def _add(self, text: str, start: int, end: int) -> int:
        """Add text to the current region; return the start of the next region if the current one ends, else `end`."""
        if self._region is _Region.CALL:
            taken = min(end, start + self._room)
            self._body.append(text[start:taken])
            self._room -= taken - start
            if taken < end:
                self._end_call(None)
            return taken
        part = text[start:end]
        if self._region is _Region.THOUGHT:
            self._thoughts.append(self._thought.add(part))
        elif self._lead is not None:
            return end - self._look_for_calls(part)
        else:
            self._say(part)
        return end

    def _look_for_calls(self, text: str) -> int:
        """Detect calls at the beginning of the answer. Return how many of the last characters belong to them."""
        form = self._parsing.format
        assert form is not None and self._lead is not None
        text = self._lead + text
        rest, tag = text.lstrip(), form.tag
        if tag and rest.startswith(tag):
            rest, tag = rest[len(tag) :].lstrip(), ""
        self._lead = None
        size = len(text) - len(rest)
        if tag.startswith(rest) and len(text) <= MAX_BLANKS:
            self._lead = text
        elif rest.startswith(form.calls.leads) and size <= MAX_BLANKS:
            self._begin_call(text[:size])
            return len(rest)
        else:
            self._say(text)
        return 0

    def _cross(self, mark: str) -> None:
        """Switch regions at a mark."""
        if self._region is _Region.CALL:
            self._end_call(mark)
        elif self._region is _Region.THOUGHT:
            self._region, self._has_thought = _Region.SAID, True
            self._said, self._thought = _Edges(leading=True), _Edges(leading=True)
        elif mark == self._call_mark:
            self._begin_call(mark)
        elif mark == self._bare:
            self._begin_call("")
            self._add(mark, 0, len(mark))
        else:
            self._let_out()
            self._region = _Region.THOUGHT

    def _begin_call(self, opening: str) -> None:
        self._region, self._opening, self._room = _Region.CALL, opening, MAX_CALL_CHARS

    def _end_call(self, closing: str | None) -> None:
        """Decode the current call. `closing`: its end mark, "" at the end of the answer, None for too long a call."""
        body, self._region = "".join(self._body), _Region.SAID
        self._body.clear()
        parsing = self._parsing
        assert parsing.format is not None
        try:
            incomplete = closing is None or (not closing and parsing.format.must_close)
            calls = [] if incomplete else parsing.format.decode(body, self._functions)
            if not calls or any(call.name not in self._functions for call in calls):
                raise ValueError("not offered")
        except ValueError:
            self._say(self._opening + body + (closing or ""))
            return
        if not parsing.parallel:
            calls = calls[: 0 if self._has_called else 1]
        self._has_called, self._said.held = True, ""
        self._calls += calls

    def _say(self, text: str) -> None:
        """Emit text, without white space next to reasoning and calls."""
        self._texts.append(self._said.add(text) if self._call_mark or self._has_thought or self._has_called else text)

    def _let_out(self) -> None:
        """Emit held-back text."""
        if self._lead:
            self._say(self._lead)
            self._lead = None if self._lead.strip() else ""
        if not (self._has_thought or self._has_called):
            self._texts.append(self._said.held)
        self._said.held = ""

    def _finish(self) -> None:
        if self._region is _Region.CALL:
            self._end_call("")
        self._let_out()

    def _piece(self) -> ParsedText:
        piece = ParsedText("".join(self._texts), "".join(self._thoughts), self._calls)
        self._texts, self._thoughts, self._calls = [], [], []
        return piece
