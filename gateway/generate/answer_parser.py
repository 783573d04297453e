"""Incremental parser of model output into text, reasoning and tool calls.

Clients influence the model's output, so each step takes time linear in the new text, and held-back text is bounded: a
partial mark, MAX_BLANKS characters of white space, MAX_CALL_CHARS characters of a call. The total result does not
depend on how the text is split into pieces. Text that looks like a call but is invalid is emitted unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.forms import ThoughtMarks
from engine.text.thoughts import ThoughtTracker
from gateway.generate.channels import ChannelParser
from gateway.generate.deltas import Marks, ParsedText
from gateway.generate.tool_decoders import Call
from gateway.generate.tool_formats import END_THINK, THINK, ToolFormat
from gateway.generate.tool_grammars import Function

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


class _Region(Enum):
    """Kind of the current text. START: no text yet, and reasoning is only allowed at the beginning."""

    START = auto()
    SAID = auto()
    THOUGHT = auto()
    CALL = auto()


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
