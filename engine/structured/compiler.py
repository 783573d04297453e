"""Compile, cache and follow grammars of one tokenizer; the only module that imports `llguidance`.

The library bounds neither the time nor the stack of a compilation. The grammar of a client is therefore compiled in
the engine process only after `engine.structured.prover` has compiled it within limits. The cache is limited in memory
and separate for each tenant. Torch-free.
"""

import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from engine.arrays import Int32Array
from engine.errors import InvalidRequestError, QueueFullError
from engine.forms import MAX_GRAMMAR_BYTES, Grammar
from engine.panics import as_error
from engine.structured import dialect

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Maximum size of a GBNF grammar after its conversion to Lark."""
DEFAULT_COST = 2**20
UNSATISFIABLE = "nothing can satisfy it"
_MAX_REASON_CHARS = 400
_MAX_REGEX_CHARS = 200
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10_000_000,  # regular expressions of real schemas exceed the library's default of a million
    step_lexer_fuel=200_000,
    step_max_items=5_000,  # real schemas need up to 2,500; the time of a step grows with the square
    max_lexer_states=50_000,  # at most 30 MB, shared by all matchers of a grammar
    verbose_errors=False,
)
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_BAD_REGEX = re.compile(r"(invalid regex .*)?regex parse error:\n +(.*)\n[ ^]*\nerror: (.*)")


class GrammarError(Exception):
    """A grammar cannot be enforced; the text is the reason."""


class CompiledGrammar:
    """A grammar compiled for one tokenizer.

    Attributes:
        cost: Memory in bytes.
        spoiled: The lexer, which all matchers share, has reached a limit, so that every further answer would fail.
    """

    def __init__(self, matcher: LLMatcher, cost: int = DEFAULT_COST) -> None:
        self._matcher = matcher
        self.cost = cost
        self.spoiled = False

    def matcher(self) -> "Matcher":
        """Return a matcher at the start of an answer; takes microseconds."""
        return Matcher(self._matcher.deep_copy(), self)


class Matcher:
    """Follows an answer through its grammar. `failed` is the reason why it cannot continue: a limit of the library, or
    a forbidden token."""

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._ended = False
        self.failed: str | None = None

    def copy(self) -> "Matcher":
        """Return a matcher at the same place, which may go on differently."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def complete(self) -> bool:
        """Whether the answer so far is complete."""
        return bool(self._ended or self._matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume the next tokens of the answer. Tokens after its end, from steps already in flight, are ignored."""
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
        """Set bit i of `target [ceil(vocab / 32)]` for every allowed next token i, including end tokens after a
        complete answer."""
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._matcher.is_error() and not self._ended:
            self._fail()

    def forced(self) -> list[int]:
        """Return the tokens that must follow because there is no choice; empty at the end.

        The library may name an added token for a text that the grammar spells; the tokens end before it."""
        if self._ended or self.failed is not None:
            return []
        tokens = list(self._matcher.compute_ff_tokens())
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else []

    def give_up(self) -> None:
        """Fail after a panic of the library, which may have left the shared lexer in any state: compile it again."""
        self.failed = "the grammar library failed"
        self._grammar.spoiled = True

    def _fail(self) -> None:
        error = self._matcher.get_error()
        self.failed = _reason(error)
        self._grammar.spoiled = self._grammar.spoiled or "lexer error" in error


class GrammarCompiler:
    """Compiles grammars for the tokenizer of the checkpoint in `folder`.

    `cache` holds the compiled grammars. Loading a tokenizer of 150,000 tokens holds the interpreter lock for a second
    or more.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: frozenset[int], cache: "GrammarCache | None" = None
    ) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.cache = cache or GrammarCache()
        self._tokenizer: LLTokenizer | OSError | ValueError | None = None
        self._loading = threading.Lock()

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.vocab_size // 32)

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it is ready."""
        return self.cache.find(grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile and cache a trusted grammar without limits. Raises InvalidRequestError."""
        found = self.cache.find(grammar)
        if found is not None:
            return found
        self.check_tokenizer(grammar)
        try:
            compiled = self.build(source_of(grammar))
        except GrammarError as error:
            raise refusal(grammar, str(error)) from error
        self.cache.keep(grammar, compiled)
        return compiled

    def build(self, source: str, cost: int = DEFAULT_COST) -> CompiledGrammar:
        """Compile a result of `source_of`; releases the interpreter lock. Raises GrammarError."""
        tokenizer = self.load()
        try:
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # most limits take effect only here
            reason = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, RecursionError) as error:
            raise GrammarError(_reason(str(error))) from error
        except BaseException as raised:
            as_error(raised)
            raise GrammarError(f"the compiler fails on it ({type(raised).__name__})") from None
        if reason:
            raise GrammarError(_reason(reason))
        return CompiledGrammar(matcher, cost)

    def check_tokenizer(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError if the tokenizer cannot be used."""
        try:
            self.load()
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0][:_MAX_REASON_CHARS] or type(error).__name__
            message = f"This model's tokenizer cannot be used for structured output: {reason}."
            raise InvalidRequestError(message, param=grammar.param, code="unsupported_parameter") from error

    def load(self) -> LLTokenizer:
        """Return the tokenizer, read on the first call. Raises OSError or ValueError."""
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._read_tokenizer()
                except BaseException as raised:
                    error = as_error(raised)
                    self._tokenizer = error if isinstance(error, OSError | ValueError) else ValueError(repr(error))
            if isinstance(self._tokenizer, Exception):
                raise self._tokenizer
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise ValueError("the model has no end token")
        text = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=sorted(self.eos_token_ids))


def source_of(grammar: Grammar) -> str:
    """Return the grammar in the library's format. Raises GrammarError.

    The conversion of GBNF is Python code and may take minutes.
    """
    if len(grammar.text.encode(errors="surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it is longer than {MAX_GRAMMAR_BYTES // 1024} KiB")
    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_reason(str(error))) from error
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise GrammarError("it is too large")
    return source


def _source(grammar: Grammar) -> str:
    """Convert without limits of length. Raises ValueError."""
    if grammar.kind == "json":
        _parse(grammar.text)  # the library inserts the text into its own JSON unchecked
        overrides: JsonCompileOptions = {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}
        if grammar.whitespace is not None:
            overrides |= {"whitespace_flexible": True, "whitespace_pattern": grammar.whitespace}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=overrides)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(dialect.ascii_classes(grammar.text))
    if grammar.kind == "choice":  # a single terminal is ten times faster than as many rules
        texts = [orjson.dumps(text).decode() for text in _parse(grammar.text)]
        if not texts:
            raise ValueError("the list of choices is empty")
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    return str(grammar_from("grammar", dialect.of_grammar(grammar.text)))


def _parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _reason(text: str) -> str:
    """Reword the library's error for the API, without its dump of the state."""
    text = text.partition("<state>")[0].partition("\n<non-verbose/>")[0].strip()
    if text.startswith("NoExtension"):
        return UNSATISFIABLE
    if text.startswith("oneOf constraints"):
        return 'the options of "oneOf" may overlap; use "anyOf"'
    keys = _UNKNOWN_KEYS.search(text)
    if keys is not None:
        return f"not supported here: the keywords {keys[1]}"
    if regex := _BAD_REGEX.search(text):
        where = "the regular expression" if regex[1] else 'the keyword "pattern"'
        return f"{where} {regex[2][:_MAX_REGEX_CHARS]}: {regex[3]}"[:_MAX_REASON_CHARS]
    return text.partition("\n")[0][:_MAX_REASON_CHARS] or "it is too complex"


def refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    """Return the error of a request whose grammar cannot be enforced."""
    return InvalidRequestError(f"'{grammar.param}' cannot be enforced: {reason}", param=grammar.param)


MAX_BYTES = 2**30
MAX_REFUSALS = 4096


class GrammarCache:
    """Compiled grammars by content and tenant.

    A grammar held by a request is found even after eviction. `max_bytes` bounds cached and held grammars together.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._alive: WeakValueDictionary[bytes, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, tuple[str, CompiledGrammar]] = OrderedDict()
        self._lock = threading.RLock()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it is ready."""
        key = grammar.key()
        with self._lock:
            found = self._alive.get(key)
            if found is None or found.spoiled:
                self._kept.pop(key, None)
                return None
            if key in self._kept:
                self._kept.move_to_end(key)
            return found

    def keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Add a grammar; evict the least recently used grammars of the tenant with the largest share."""
        key = grammar.key()
        with self._lock:
            self._alive[key] = compiled
            self._kept.pop(key, None)
            self._kept[key] = grammar.tenant, compiled
            while len(self._kept) > 1 and self._num_bytes() > self._max_bytes:
                self._evict(but=key)

    def make_room(self, cost: int) -> None:
        """Evict until `cost` bytes fit. Raises QueueFullError if running requests hold too much."""
        with self._lock:
            while self._kept and self._num_bytes() + cost > self._max_bytes:
                self._evict()
            if self._alive and self._num_bytes() + cost > self._max_bytes:
                raise QueueFullError("The grammars of running requests fill the memory for grammars.", retry_after=5.0)

    def _num_bytes(self) -> int:
        return sum(compiled.cost for compiled in self._alive.values())

    def _evict(self, but: bytes = b"") -> None:
        by_tenant: defaultdict[str, int] = defaultdict(int)
        for key, (tenant, compiled) in self._kept.items():
            by_tenant[tenant] += compiled.cost if key != but else 0
        largest = max(by_tenant, key=lambda tenant: by_tenant[tenant])
        del self._kept[next(key for key, (tenant, _) in self._kept.items() if tenant == largest and key != but)]


class Refusals:
    """Reasons of refused grammars, by content and tenant; beyond `size`, the oldest are dropped."""

    def __init__(self, size: int = MAX_REFUSALS) -> None:
        self._size = size
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def find(self, grammar: Grammar) -> str | None:
        """Return the reason if the grammar was refused."""
        return self._reasons.get(grammar.key())

    def add(self, grammar: Grammar, reason: str) -> None:
        """Record that the grammar is refused."""
        self._reasons[grammar.key()] = reason
        while len(self._reasons) > self._size:
            self._reasons.popitem(last=False)
