"""Token ids to text, a few ids at a time, in constant time per token and never with half a character.

Almost every tokenizer's decoder joins what its tokens stand for, so a token is a fixed string of bytes and the text is
the UTF-8 decoding of their concatenation (`ByteRule`, read from the decoder of `tokenizer.json`). Decoders of any other
kind are run over a short window of ids. Knows nothing of requests, stop strings or models.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_HELD_TOKENS = 16  # a character has at most 4 bytes; a longer "unfinished" one is a real U+FFFD in the text
_CONTEXT_TOKENS = 4  # enough to hold the first bytes of a character that the prompt leaves unfinished


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("tidemill.each_byte", _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters stand for
    themselves, the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class ByteRule:
    """How a decoder turns each token into bytes.

    `replacements` are applied to a token's text in order; `byte_fallback` reads tokens such as <0xE2> as bytes;
    `strip` counts the leading `strip_text`s cut off the whole text; `bare_first` cuts all of them off the first token.
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
            except KeyError:  # an added token with, say, a space in it
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    @property
    def errors(self) -> str:
        """What becomes of bytes that are no character: byte fallback shows every one of them, byte level each run."""
        return "tidemill.each_byte" if self.byte_fallback else "replace"


def read_byte_rule(decoder: dict[str, Any] | None) -> ByteRule | None:
    """The rule of a decoder as `tokenizer.json` spells it, or None where tokens do not decode one by one."""
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
    """Add one step that acts on each token to `rule`; False where it is not such a step."""
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


class TokenTable(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def byte_rule(self) -> ByteRule | None: ...

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes | None:
        """The bytes of a token, None for one that is not shown. Only called where there is a `byte_rule`."""
        ...

    def decode_window(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of some ids by the tokenizer's own decoder."""
        ...


class IncrementalDetokenizer:
    """The text of one growing answer.

    With `prompt_ids` the text is what the answer adds to the prompt's (a leading space stays, a character begun by
    the prompt is completed); without, it is that of the answer alone. All that `push` and `finish` return, joined, is
    the text of all ids, whatever the sizes of the pushes. Bytes that are no UTF-8 come out as U+FFFD.
    """

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        rule = table.byte_rule
        self._text: _ByteText | _WindowText
        if rule is None:
            self._text = _WindowText(lambda ids: table.decode_window(ids, skip_special_tokens), prompt_ids)
        else:
            self._text = _ByteText(rule, lambda i: table.visible_bytes(i, skip_special_tokens), prompt_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids; returns the characters that they complete."""
        return self._text.push(token_ids)

    def finish(self) -> str:
        """The last characters, U+FFFD for an unfinished one."""
        return self._text.finish()

    @property
    def holds_text(self) -> bool:
        """Whether the ids pushed so far end inside a character."""
        return self._text.holds_text


class _ByteText:
    """Text by `ByteRule`."""

    def __init__(self, rule: ByteRule, lookup: Callable[[int], bytes | None], prompt_ids: Sequence[int]) -> None:
        self._lookup = lookup
        self._decoder = codecs.getincrementaldecoder("utf-8")(rule.errors)
        self._strip_text = rule.strip_text
        context = self._context(prompt_ids)
        self._decoder.decode(b"".join(context))
        self._strip_left = 0 if context else rule.strip
        self._bare_first = rule.bare_first and not context

    def _context(self, prompt_ids: Sequence[int]) -> list[bytes]:
        """The bytes of the prompt's last visible tokens."""
        found: list[bytes] = []
        for token_id in reversed(prompt_ids):
            piece = self._lookup(token_id)
            if piece is not None:
                found.append(piece)
                if len(found) == _CONTEXT_TOKENS:
                    break
        return found[::-1]

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = [piece for piece in map(self._lookup, token_ids) if piece is not None]
        if self._bare_first and pieces:
            pieces[0] = pieces[0].replace(b" ", b"")
            self._bare_first = False
        text = self._decoder.decode(b"".join(pieces))
        return self._strip(text) if self._strip_left and text else text

    def finish(self) -> str:
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
        return bool(self._decoder.getstate()[0])


class _WindowText:
    """Text by running a decoder over the last ids, with the ids before them as its context."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)  # ids before it have been shown; all are context for those after it
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
        # ids without text (special ones) cannot serve as context
        self._ids = fresh if self._decode(fresh) else self._ids[: self._read]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        return self._show(self._decode(self._ids)) if self.holds_text else ""

    @property
    def holds_text(self) -> bool:
        return len(self._ids) > self._read
