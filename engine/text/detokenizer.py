"""Incremental detokenisation in constant time per token, without partial characters.

Decoders of almost all tokenizers concatenate their tokens, so that a token is a fixed byte string and the text is the
UTF-8 decoding of the concatenation (`ByteRule`, read from the decoder in `tokenizer.json`). Other decoders run over a
short window of ids.

Stop strings, and the text of one streamed choice: detokenisation combined with stop strings.

The caller ends the request when a stop string is found.
"""

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.text.thoughts import Detector

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_HELD_TOKENS = 16  # a character has at most 4 bytes; after more tokens a U+FFFD is part of the text
_CONTEXT_TOKENS = 4  # enough for the first bytes of a character that the prompt leaves incomplete


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("tidemill.each_byte", _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Printable Latin-1 characters represent themselves; the other bytes, in order, are represented from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class ByteRule:
    """Conversion of tokens to bytes by a decoder.

    Attributes:
        byte_level: Characters represent bytes.
        replacements: Applied to the text of a token, in order.
        byte_fallback: Tokens such as <0xE2> represent bytes.
        strip: Number of leading `strip_text`s removed from the whole text.
        bare_first: All spaces are removed from the first token.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: int = 0
    strip_text: str = " "
    bare_first: bool = False

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token with other characters, such as a space
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    @property
    def errors(self) -> str:
        """Error handler for invalid bytes: byte fallback replaces each byte, byte level each run."""
        return "tidemill.each_byte" if self.byte_fallback else "replace"


def read_byte_rule(decoder: dict[str, Any] | None) -> ByteRule | None:
    """Read the rule of a decoder in `tokenizer.json`; None if tokens do not decode independently."""
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    rule: dict[str, Any] = {"replacements": ()}
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["stop"] == 0 and "strip" not in rule:
            rule |= {"strip": step["start"], "strip_text": step["content"]}
        elif fused or "byte_level" in rule or not _read_token_step(step, rule):
            return None
    return ByteRule(**rule)


def _read_token_step(step: dict[str, Any], rule: dict[str, Any]) -> bool:
    """Add a step that acts on single tokens to `rule`; return False for another kind of step."""
    match step:
        case {"type": "ByteLevel"} if rule == {"replacements": ()}:
            rule["byte_level"] = True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if "byte_fallback" not in rule:
            rule["replacements"] += ((old, new),)
        case {"type": "Metaspace", "replacement": str(old)} if "byte_fallback" not in rule:
            rule["replacements"] += ((old, " "),)
            rule["bare_first"] = step.get("prepend_scheme", "always") != "never"
        case {"type": "ByteFallback"}:
            rule["byte_fallback"] = True
        case _:
            return False
    return True


class ByteDetokenizer:
    """Text of one growing answer by `ByteRule`."""

    def __init__(self, rule: ByteRule, lookup: Callable[[int], bytes | None], prompt_ids: Sequence[int]) -> None:
        self._lookup = lookup
        self._decoder = codecs.getincrementaldecoder("utf-8")(rule.errors)
        self._strip_text = rule.strip_text
        context = self._context(prompt_ids)
        self._decoder.decode(b"".join(context))
        self._strip_left = 0 if context else rule.strip
        self._bare_first = rule.bare_first and not context

    def _context(self, prompt_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of the prompt's last visible tokens."""
        found: list[bytes] = []
        for token_id in reversed(prompt_ids):
            piece = self._lookup(token_id)
            if piece is not None:
                found.append(piece)
                if len(found) == _CONTEXT_TOKENS:
                    break
        return found[::-1]

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids; return the characters that they complete."""
        pieces = [piece for piece in map(self._lookup, token_ids) if piece is not None]
        if self._bare_first and pieces:
            pieces[0] = pieces[0].replace(b" ", b"")
            self._bare_first = False
        text = self._decoder.decode(b"".join(pieces))
        return self._strip(text) if self._strip_left and text else text

    def finish(self) -> str:
        """Return the last characters, with U+FFFD for an incomplete one."""
        text = self._decoder.decode(b"", True)
        return self._strip(text) if self._strip_left and text else text

    def _strip(self, text: str) -> str:
        while self._strip_left and text.startswith(self._strip_text):
            text = text[len(self._strip_text) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text

    @property
    def holds_text(self) -> bool:
        """Whether the ids so far end inside a character."""
        return bool(self._decoder.getstate()[0])


class WindowDetokenizer:
    """Text of one growing answer by a decoder run over the last ids, with earlier ids as context."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)  # ids before it are shown and serve as context
        self._shown = decode(self._ids) if self._ids else ""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new, fresh = text[len(self._shown) :], self._ids[self._read :]
        # Ids without text (special tokens) cannot serve as context.
        self._ids = fresh if self._decode(fresh) else self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        return self._show(self._decode(self._ids)) if self.holds_text else ""

    @property
    def holds_text(self) -> bool:
        return len(self._ids) > self._read


def detokenizer_for(
    tokenizer: "Tokenizer", prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> ByteDetokenizer | WindowDetokenizer:
    """Return a detokenizer for one growing answer.

    With `prompt_ids`, the text is the continuation of the prompt's text: a leading space stays, and a character begun
    by the prompt is completed. Without, the answer is decoded on its own. The joined results of `push` and `finish` do
    not depend on the sizes of the pushes. Invalid UTF-8 becomes U+FFFD.
    """
    rule = tokenizer.byte_rule
    if rule is None:
        return WindowDetokenizer(lambda ids: tokenizer.decode_window(ids, skip_special_tokens), prompt_ids)
    return ByteDetokenizer(rule, lambda i: tokenizer.visible_bytes(i, skip_special_tokens), prompt_ids)


class StopMatcher:
    """Finds the first complete stop string and releases text as soon as it cannot be part of one.

    Of several stop strings that end at the same character, the longest wins. The result does not depend on the sizes of
    the pushes. `include` keeps the stop string in the text. Constant time per character and stop string.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._stops = [Detector(text) for text in stop if text]
        self._held = ""
        self._include = include
        self.matched: str | None = None
        self.position = 0  # number of released characters

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the released text, and the stop string if one is complete. Nothing may follow a match."""
        assert self.matched is None, "no text may follow a stop string"
        if not self._stops:
            return self._let_through(text), None
        for index, char in enumerate(text):
            complete = [
                str(stop.wanted)
                for stop in self._stops
                if (stop.matched or stop.wanted[0] == char) and stop.advance(char)
            ]
            if complete:
                self.matched = found = max(complete, key=len)
                seen = self._held + text[: index + 1]
                self._held = ""
                return self._let_through(seen if self._include else seen[: len(seen) - len(found)]), found
        seen, held = self._held + text, max(stop.matched for stop in self._stops)
        cut = len(seen) - held
        self._held = seen[cut:]
        return self._let_through(seen[:cut]), None

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return self._let_through(held)

    def _let_through(self, text: str) -> str:
        self.position += len(text)
        return text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Result of a push.

    Attributes:
        stop: Stop string that ended the answer.
        num_tokens: Number of tokens newly covered by the text. A token counts once its last character is released (one
            without text: once all earlier tokens are); after a stop string, if any of its characters is in the text.
            The sum never exceeds the number of pushed tokens.
    """

    text: str
    stop: str | None = None
    num_tokens: int = 0


class OutputTextStream:
    """Text of one choice. Nothing may be pushed after a delta with `stop`.

    Stop strings are matched only after the first `min_tokens` tokens. With `prompt_ids` the text continues the prompt
    (completions); chat answers stand alone.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_ids: Sequence[int] = (),
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = detokenizer_for(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop)
        self._unchecked_tokens = min_tokens if stop else 0
        self._length = 0  # characters detokenised
        self._shown = 0  # characters returned
        # Begin and end of tokens not counted yet, and begins of the tokens of an incomplete character.
        self._open: deque[tuple[int, int]] = deque()
        self._unfinished: list[int] = []

    def push(self, token_ids: Sequence[int], final: bool = False) -> TextDelta:
        """Add the tokens of a step; `final` releases all text held back."""
        texts: list[str] = []
        for token_id in token_ids:
            begin, text = self._length, self._detokenizer.push((token_id,))
            self._length += len(text)
            if self._unchecked_tokens > 0:
                self._unchecked_tokens -= 1
                shown, stop = text, None
            else:
                shown, stop = self._matcher.push(text)
            self._record(begin)
            texts.append(shown)
            if stop is not None:
                return self._cut(texts, stop)
        return self._finish(texts) if final else self._delta(texts)

    def push_plain(self, token_ids: Sequence[int]) -> str | None:
        """Like `push` without stop strings and counts. Return None if the tokens end inside their first character."""
        text = self._detokenizer.push(token_ids)
        return None if not text and self._detokenizer.holds_text else text

    def _record(self, begin: int) -> None:
        """Record the begin of the last token; a completed character ends all of its tokens."""
        self._unfinished.append(begin)
        if not self._detokenizer.holds_text:
            self._open.extend((start, self._length) for start in self._unfinished)
            self._unfinished.clear()

    def _finish(self, texts: list[str]) -> TextDelta:
        rest = self._detokenizer.finish()
        self._length += len(rest)
        shown, stop = self._matcher.push(rest) if self._unchecked_tokens <= 0 else (rest, None)
        texts.append(shown)
        if stop is not None:
            return self._cut(texts, stop)
        texts.append(self._matcher.flush())
        text, count = "".join(texts), len(self._open) + len(self._unfinished)
        self._open.clear()
        self._unfinished.clear()
        return TextDelta(text, None, count)

    def _delta(self, texts: list[str]) -> TextDelta:
        text = "".join(texts)
        self._shown += len(text)
        count = 0
        while self._open and self._open[0][1] <= self._shown:
            self._open.popleft()
            count += 1
        return TextDelta(text, None, count)

    def _cut(self, texts: list[str], stop: str) -> TextDelta:
        text = "".join(texts)
        self._shown += len(text)
        count = sum(begin < self._shown for begin in [*(begin for begin, _ in self._open), *self._unfinished])
        self._open.clear()
        self._unfinished.clear()
        return TextDelta(text, stop, count)
