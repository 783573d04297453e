"""Work for an answer grows no faster than the answer.

Answers repeat letters, marks and calls of every format, and go through parsers, detokenizers and stop strings. Grammars
are compiled within limits."""

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import orjson
import pytest
import tokenizer_folders
from cost_tools import Work, check, cost_of, cpu_fault
from support.tables import mostly_slow
from test_tools import write

from engine.api import EngineRequest, SamplingParams
from engine.errors import InvalidRequestError
from engine.forms import Grammar, GrammarKind
from engine.structured.compiler import GrammarCompiler
from engine.structured.prover import ProofLimits
from engine.structured.ready import Grammars, Prover
from engine.text.detokenizer import OutputTextStream
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.grammars import Function
from gateway.generate.tool_formats import FORMATS

# Answers, taken apart

FUNCTIONS = (Function("f", {}),)
LETTERS = ("a", " ", "\n", "<", "{", "[", '"', "'", "\\", ",", ":", "(", "=")
_TAG = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")


def frames(name: str | None) -> dict[str, tuple[str, str]]:
    """Return the text before and behind the part that grows: none, a thought, an open call, a whole call."""
    found = {"said": ("", ""), "thought": ("<think>", ""), "whole thought": ("<think>", "</think>x")}
    if name is not None:
        first, _, last = write(name, [("f", {"a": "@"})]).partition("@")
        found |= {"open call": (first, ""), "call": (first, last)}
    return found


def atoms(name: str | None) -> list[str]:
    """Return the texts to repeat: letters with a meaning, marks of the format, their beginnings, a call."""
    call = "" if name is None else write(name, [("f", {"a": "b"})])
    tags = sorted({"<think>", "</think>", *_TAG.findall(call), *(FORMATS[name].marks if name else ())})
    return [each for each in dict.fromkeys([*LETTERS, *tags, *(tag[:-1] for tag in tags), call, call[:-1]]) if each]


OFTEN_READ = [(None, "said"), *((name, "open call") for name in FORMATS)]
"""A call that does not end is the part that a parser may read again and again."""


@pytest.mark.parametrize(
    ("name", "frame"), mostly_slow([(name, each) for name in (None, *FORMATS) for each in frames(name)], OFTEN_READ)
)
def test_answers(name: str | None, frame: str) -> None:
    parsing = Parsing(FORMATS[name] if name else None, FUNCTIONS if name else (), reasons=True)
    first, last = frames(name)[frame]

    def make(n: int, atom: str, size: int | None = None) -> Work:
        text = first + (atom * n)[:n] + "x" + last
        size = size or len(text)
        parts = [text[start : start + size] for start in range(0, len(text), size)]

        def work() -> None:
            parser = parsing.parser()
            for number, part in enumerate(parts, 1):
                parser.push(part, final=number == len(parts))

        return work

    for atom in atoms(name):
        check(functools.partial(make, atom=atom, size=1), 0, 200, name=frame)
        check(functools.partial(make, atom=atom), 100, 2000, name=frame)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_one_answer(name: str) -> None:
    """Many calls, and one call with many arguments."""
    functions = (Function("f", {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}}),)

    def make(n: int, wide: bool = False) -> Work:
        calls = [("f", {f"p{i}": "b" for i in range(n)})] if wide else [("f", {"a": "b"})] * n
        text = write(name, calls)
        return lambda: Parsing(FORMATS[name], functions).parser().push(text, final=True)

    check(make, 16, 500)
    check(functools.partial(make, wide=True), 16, 500)


# Tokens, texts and stop strings

STOPS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda n: {},
    "one": lambda n: {"stop": ("x",)},
    "letters": lambda n: {"stop": ("a" * n + "b", "b" * n, "é" * n, "東" * n)},
    "after a prompt": lambda n: {"prompt_ids": [404] * n},
}


@pytest.mark.parametrize("texts", ["a東", pytest.param(["\x80", "<|im_start|>", " "], marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", ["byte_level", "llama2", "words"])
def test_texts(name: str, stops: str, texts: Iterable[str]) -> None:
    """The tokens come one by one."""
    tokenizer = tokenizer_folders.load(name)

    def make(n: int, text: str) -> Work:
        ids = tokenizer.encode(text)
        options, token_ids = STOPS[stops](n), (ids * n)[:n]

        def work() -> None:
            stream = OutputTextStream(tokenizer, **options)
            for number, token_id in enumerate(token_ids, 1):
                if stream.push([token_id], final=number == n).stop is not None:
                    return

        return work

    for text in texts:
        check(functools.partial(make, text=text), 64, 512, name=repr(text))


# Grammars


@dataclass
class Preparing:
    """Grammars of an engine and their event loop."""

    grammars: Any
    loop: asyncio.AbstractEventLoop
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def prepare(self, kind: GrammarKind, text: str) -> InvalidRequestError | None:
        """Prepare a grammar with this text and a new number, without which it would be ready; return its refusal."""
        text += str(next(self.numbers))
        grammar = Grammar(kind, orjson.dumps([text]).decode() if kind == "choice" else text)
        sampling = SamplingParams(max_tokens=9, grammar=grammar)
        try:
            self.loop.run_until_complete(self.grammars.prepare([EngineRequest("a", (1,), sampling)]))
        except InvalidRequestError as error:
            return error
        return None


@pytest.fixture(scope="module")
def preparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparing]:
    folder = tokenizer_folders.byte_level(tmp_path_factory.mktemp("grammars"))
    tokenizer, loop = Tokenizer.load(folder, probe=False), asyncio.new_event_loop()
    compiler = GrammarCompiler(folder, tokenizer.vocab_size, frozenset({tokenizer.eos_token_id or 0}))
    grammars = Grammars(compiler, Prover(compiler), ProofLimits(seconds=0.3), quick_seconds=0.1)
    yield Preparing(grammars, loop)
    loop.run_until_complete(grammars.stop())
    loop.close()


GRAMMAR_ATOMS = ("a", "\n", "(", "a: b\n")


@pytest.mark.slow
@pytest.mark.parametrize("atom", GRAMMAR_ATOMS)
@pytest.mark.parametrize("kind", get_args(GrammarKind))
def test_grammars(preparing: Preparing, kind: GrammarKind, atom: str) -> None:
    """The work of the engine's own process on the text of a grammar, valid or not; the prover is another process.

    Answers that follow a grammar are not measured: of a right recursion the library visits all open rules at every
    token, up to its limit of items in a step."""

    def make(n: int) -> Work:
        return functools.partial(preparing.prepare, kind, (atom * n)[:n])

    assert cpu_fault(make, 1000, 0.03) is None  # threads and processes start: small figures scatter


@pytest.mark.slow
def test_a_grammar_of_new_lines_is_refused_in_time(preparing: Preparing) -> None:
    """The library's conversion takes quadratic time. The prover ends it, and the engine has no work with it."""
    errors: list[InvalidRequestError | None] = []

    def lines(text: str) -> int:
        return cost_of(lambda: errors.append(preparing.prepare("grammar", text))).lines

    lines("a")  # starts the prover
    assert lines("\n" * 200_000) < 4 * lines("a")
    assert errors[1] is not None
    assert "longer than 0.3 s" in errors[1].message
