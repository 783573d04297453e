"""Grammars made ready for use, and the matchers that follow an answer; the one place that knows `llguidance`.

What cannot be enforced is refused when it is compiled, never later and never ignored. Compiling lets go of the
interpreter's lock, and takes milliseconds, or tenths of a second for a hostile grammar: it belongs in a thread. Nothing
here is a secret of one thread; a matcher is used by one at a time. Torch-free.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from engine.arrays import Int32Array
from engine.errors import InvalidRequestError
from engine.grammar import MAX_GRAMMAR_BYTES, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 256
_MAX_REASON_CHARS = 400
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10_000_000,  # regular expressions of real schemas take more than the library's million
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_BAD_REGEX = re.compile(r"(invalid regex .*)?regex parse error:\n +(.*)\n[ ^]*\nerror: (.*)")


class CompiledGrammar:
    """A grammar for one tokenizer. `matcher` gives one for the beginning of an answer: microseconds."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """Follows an answer through its grammar. `failed`: why it cannot go on, a limit or a token that was not allowed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._ended = False
        self.failed: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the answer so far is a whole one."""
        return bool(self._ended or self._matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the answer. What follows its end, a token or two of steps that were on their way,
        means nothing."""
        for token_id in token_ids:
            if self._ended or self.failed is not None:
                return
            accepting = self._matcher.is_stopped()
            if not self._matcher.consume_token(token_id):
                if accepting:
                    self._ended = True
                else:
                    self._fail()

    def write_mask(self, target: Int32Array) -> None:
        """Set bit i of `target [ceil(vocab / 32)]` for every token i that may come next, the end of the answer where it
        is a whole one."""
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._matcher.is_error() and not self._ended:
            self._fail()

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice; none at the end."""
        return [] if self._ended or self.failed is not None else list(self._matcher.compute_ff_tokens())

    def _fail(self) -> None:
        self.failed = _reason(self._matcher.get_error())


class GrammarCompiler:
    """Compiles for one model's tokenizer and keeps what was used last. `folder`: the checkpoint's; its tokenizer is
    read at the first need, which takes a second or two for a large vocabulary."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder = folder
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._keeping = threading.Lock()

    @property
    def mask_words(self) -> int:
        """Words of 32 tokens that a mask has."""
        return -(-self.vocab_size // 32)

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar, if it is ready."""
        key = _key(grammar)
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Slow: call it in a thread. Raises InvalidRequestError, which says what is wrong or cannot be enforced."""
        found = self.find(grammar)
        if found is not None:
            return found
        compiled = CompiledGrammar(self._compile(grammar))
        with self._keeping:
            self._kept[_key(grammar)] = compiled
            while len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise _refusal(grammar, f"it is longer than {MAX_GRAMMAR_BYTES // 1024} KiB")
        tokenizer = self._load(grammar)
        try:
            matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise _refusal(grammar, _reason(str(error))) from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # most limits are met here, and not before
        if matcher.is_error():
            raise _refusal(grammar, _reason(matcher.get_error()))
        return matcher

    def _load(self, grammar: Grammar) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    if not self._eos_token_ids:
                        raise ValueError("no token ends an answer")
                    text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self._eos_token_ids)
                except (OSError, ValueError) as error:
                    message = "This model's tokenizer cannot be used for structured output."
                    raise InvalidRequestError(message, param=grammar.param, code="unsupported_parameter") from error
            return self._tokenizer


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ValueError."""
    if grammar.kind == "json":
        _parse(grammar.text)  # the library puts the text into its own JSON as it is
        overrides: JsonCompileOptions = {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}
        if grammar.whitespace is not None:
            overrides |= {"whitespace_flexible": True, "whitespace_pattern": grammar.whitespace}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=overrides)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":  # one terminal: as many rules would take ten times as long
        texts = [orjson.dumps(text).decode() for text in _parse(grammar.text)]
        if not texts:
            raise ValueError("there is nothing to choose from")
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    return str(grammar_from("grammar", grammar.text))


def _parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _key(grammar: Grammar) -> bytes:
    parts = (grammar.kind, grammar.whitespace or "", str(grammar.whitespace is None), grammar.text)
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _reason(text: str) -> str:
    """The library's error in the words of the API, without the state that it may show behind it."""
    text = text.partition("<state>")[0].partition("\n<non-verbose/>")[0].strip()
    if text.startswith("NoExtension"):
        return "nothing can satisfy it"
    if text.startswith("oneOf constraints"):
        return 'the keyword "oneOf" is not supported (anyOf is)'
    keys = _UNKNOWN_KEYS.search(text)
    if keys is not None:
        return f"not supported here: the keywords {keys[1]}"
    if regex := _BAD_REGEX.search(text):
        where = "the regular expression" if regex[1] else 'the keyword "pattern"'
        return f"{where} {regex[2]}: {regex[3]}"
    return text.partition("\n")[0][:_MAX_REASON_CHARS] or "it is too complex"


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    message = f"'{grammar.param}' cannot be enforced: {reason}"
    return InvalidRequestError(message, param=grammar.param, code="invalid_value")
