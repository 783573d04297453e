"""An answer taken apart as it grows: what is said, what is thought, and the calls of functions in it.

transformers' parser finds the parts; what is in a call is read by its format. What comes out in all does not depend on
how the text was cut into pieces, and text that looks like a call and is none comes out as it is, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from engine.text.thoughts import ThoughtMarks, ThoughtTracker
from gateway.generate.tool_formats import END_THINK, THINK, Call, ToolFormat
from gateway.generate.tool_grammars import Function

_PLAIN = {"content": "text", "content_args": {"strip": False}, "repeats": True}


@dataclass(slots=True)
class Piece:
    """What some more text of an answer adds to it."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers of one request are taken apart. `format` None: it offers no functions. `reasons`: the model may
    think before it speaks, between `marks`, and `is_thinking`: the prompt has already begun to. `parallel`: it may call
    several. `once`: it thinks at its beginning or not at all."""

    format: ToolFormat | None = None
    functions: Sequence[Function] = ()
    reasons: bool = False
    is_thinking: bool = False
    parallel: bool = True
    marks: ThoughtMarks | None = None
    once: bool = False

    def parser(self) -> "AnswerParser":
        return AnswerParser(self)

    def tracker(self) -> ThoughtTracker | None:
        """What counts the tokens of thoughts; None: there are none."""
        return None if self.marks is None else ThoughtTracker(self.marks, self.is_thinking, self.once)

    @property
    def shows_special_tokens(self) -> bool:
        return self.format is not None and self.format.is_special


class AnswerParser:
    """One answer. Nothing may be pushed after the last piece."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._functions: Mapping[str, Function] = {each.name: each for each in parsing.functions}
        self._parser = ResponseParser(_template(parsing), prefix="")
        self._body = ""
        self._thought = self._called = False
        self._held = ""  # white space that only counts if more follows
        if parsing.is_thinking:
            self._parser.feed(THINK)

    def push(self, text: str, final: bool = False) -> Piece:
        """Add text; `final` lets out all that was held back."""
        piece = Piece()
        for event in self._parser.feed(text):
            self._take(event, piece, closed=True)
        if final:
            for event in self._parser.finalize()[1]:
                self._take(event, piece, closed=False)
            if not self._called and not self._thought:
                piece.text += self._held
        return piece

    def _take(self, event: Mapping[str, Any], piece: Piece, closed: bool) -> None:
        kind, name = event["type"], event["field"]
        if name == "calls":
            self._take_call(event, piece, closed)
        elif name == "reasoning":
            self._take_thought(kind, event, piece)
        elif kind == "region_chunk":
            self._say(event["text"], piece)

    def _take_thought(self, kind: str, event: Mapping[str, Any], piece: Piece) -> None:
        if kind == "region_chunk":
            text = self._held + event["text"]
            shown = text.rstrip()
            self._held = text[len(shown) :]
            piece.reasoning += shown if self._body else shown.lstrip()
            self._body += shown.lstrip()
        elif kind == "region_close":
            self._thought, self._held, self._body = True, "", ""

    def _take_call(self, event: Mapping[str, Any], piece: Piece, closed: bool) -> None:
        if event["type"] != "region_close":
            return
        parsing, body = self._parsing, event["value"]["body"]
        assert parsing.format is not None
        try:
            calls = parsing.format.decode(body, self._functions)
            if not calls or any(call.name not in self._functions for call in calls):
                raise ValueError("not offered")
        except ValueError:
            self._say(event["value"]["opening"] + body + (parsing.format.closes if closed else ""), piece)
            return
        if not parsing.parallel:
            calls = calls[: 0 if self._called else 1]
        self._called, self._held = True, ""
        piece.calls += calls

    def _say(self, text: str, piece: Piece) -> None:
        """Around thoughts and calls, white space is no part of what is said."""
        if not (self._thought or self._called):
            piece.text += text
            return
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            piece.text += shown.lstrip() if self._thought and not self._body else shown
            self._body = "said"


def _template(parsing: Parsing) -> dict[str, Any]:
    fields: dict[str, dict[str, Any]] = {"content": _PLAIN}
    if parsing.reasons:
        fields["reasoning"] = {**_PLAIN, "open": THINK, "close": END_THINK, "repeats": not parsing.once}
    if parsing.format is not None:
        ends = {"close": parsing.format.closes} if parsing.format.closes else {}
        value = {"opening": "{opening}", "body": "{content}"}
        fields["calls"] = {**_PLAIN, "open_pattern": parsing.format.opens, "transform": value, **ends}
    return {"start_anchor": THINK, "fields": fields}
