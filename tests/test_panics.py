"""A panic of a native library (pyo3's PanicException is a BaseException) is an error of its request only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_structured
from batch_tools import FAST, batch_server, check_ended, jsonl, line, submit, until
from fake_engine import FakeEngine, say, serve
from fakes.runner import FakeRunner
from faulty_runner import FaultyRunner
from support.http import get, post
from test_sick_engine import VOCAB, make_engine
from test_structured import ask

from engine.forms import EmbeddingSpec, Grammar, Pooling
from engine.panics import CONTROL, LibraryPanicError, as_error
from engine.structured.compiler import GrammarError
from engine.text.tokenizer import Tokenizer

SECRET = "boom-4711"
"""Text of a request; a panic quotes it."""


class PanicException(BaseException):
    """As pyo3 defines it for each library."""


class Panics:
    """Stands before a native object: every call whose arguments contain SECRET panics."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if SECRET in repr(args):
                raise PanicException(f'byte index 5 is not a char boundary of "{args}"')
            return found(*args, **kwargs)

        return call


@pytest.fixture
def panicking(tokenizer: Tokenizer) -> Iterator[Tokenizer]:
    """The tokenizer, whose library panics at SECRET."""
    chat = tokenizer._chat
    assert chat is not None
    inner, backend = tokenizer._tokenizer, chat._backend
    tokenizer._tokenizer, chat._backend = Panics(inner), Panics(backend)
    yield tokenizer
    tokenizer._tokenizer, chat._backend = inner, backend


CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": SECRET}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("/v1/responses", {"input": SECRET}),
    ("/v1/responses/input_tokens", {"input": SECRET}),
    ("/v1/embeddings", {"input": SECRET}),
    ("/tokenize", {"prompt": SECRET}),
]


async def test_a_panic_is_an_answer(panicking: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(say(panicking, "done"), embedding=EmbeddingSpec(Pooling.LAST, 8, True, ""))
    async with serve(engine, panicking) as served:
        for path, body in REQUESTS:
            answer = await post(served, path, **body)
            assert answer.status_code == 500, answer.text
            assert answer.json()["error"]["message"] and answer.headers["x-should-retry"] == "false"
            assert "PanicException" in caplog.text and SECRET not in caplog.text + answer.text, path
            assert (await post(served, "/v1/completions", prompt="well")).status_code == 200
            caplog.clear()


@pytest.mark.parametrize("method", ["push", "push_plain"])
async def test_a_panic_in_an_answer_ends_its_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """`push_plain` runs in the callback by which the engine's outputs arrive, for all requests."""
    import engine.text.detokenizer as stopping

    before = getattr(stopping.OutputTextStream, method)
    panicking = [True]

    def panic(*args: Any, **kwargs: Any) -> Any:
        if panicking:
            raise PanicException(SECRET)
        return before(*args, **kwargs)

    monkeypatch.setattr(stopping.OutputTextStream, method, panic)
    server = serve(FakeEngine(say(tokenizer, "one two three")), tokenizer)
    async with server as served:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        text = (await post(served, **body)).text
        assert '"error"' in text and "server_error" in text, text
        panicking.clear()
        assert "[DONE]" in (await post(served, **body)).text
    assert SECRET not in caplog.text


async def test_a_line_that_panics_gets_a_row(
    panicking: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [line(i) if i != 3 else line(i, prompt=SECRET) for i in range(20)]
    async with batch_server(panicking, tmp_path) as (served, client):
        batch = await until(client, (await submit(client, jsonl(lines))).id)
        output, errors = await check_ended(client, batch, [f"id-{i}" for i in range(20)])
        assert len(output) == 19 and errors["id-3"]["response"]["status_code"] == 500
        retries = (await get(served, "/metrics")).text
        name = 'tidemill_batch_line_retries_total{cause="unknown"} '
        assert float(retries.partition(name)[2].split()[0]) >= FAST.attempts - 1
    assert SECRET not in caplog.text


def test_a_grammar_that_panics_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call into the library that a step makes panics at its fourth run."""
    for call in ("advance", "write_mask", "forced", "copy"):
        made = test_structured.compiler().compile(Grammar("regex", "[ab]{30}"))
        matcher, runs = type(made.matcher()), [0]
        work = getattr(matcher, call)

        def panic(self: Any, *args: Any, work: Any = work, runs: list[int] = runs) -> Any:
            runs[0] += 1
            if runs[0] == 4:
                raise PanicException(SECRET)
            return work(self, *args)

        driver = test_structured.make_driver("torch")
        driver.add(ask("well", None, 20))
        with monkeypatch.context() as patch:
            patch.setattr(matcher, call, panic)
            driver.add(ask("ill", Grammar("regex", "[ab]{30}")))
            driver.run()
        assert driver.finals["well"].error is None
        assert (driver.finals["ill"].error is not None) == (runs[0] >= 4), call
    assert SECRET not in caplog.text


async def test_a_step_that_panics_ends_its_requests_and_not_the_engine(tokenizer: Tokenizer) -> None:
    prompt_of_five = lambda _, work: any((each.start, each.end) == (0, 5) for each in work)  # noqa: E731
    runner = FaultyRunner(FakeRunner(block_size=16, vocab_size=VOCAB), prompt_of_five, PanicException)
    async with serve(make_engine(runner), tokenizer) as served:
        for size, status in ((3, 200), (5, 500), (3, 200)):
            answer = await post(served, "/v1/completions", prompt=[7] * size, max_tokens=2)
            assert answer.status_code == status


def test_a_grammar_whose_compilation_panics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any, **__: Any) -> Any:
        raise PanicException(SECRET)

    compiler = test_structured.compiler()
    compiler.load()
    monkeypatch.setattr("engine.structured.compiler.LLMatcher", panic)
    with pytest.raises(GrammarError, match="PanicException") as caught:
        compiler.build("start: /a/")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("error", [kind() for kind in CONTROL], ids=repr)
def test_ends_of_tasks_and_processes_are_no_errors(error: BaseException) -> None:
    for raised in (error, BaseExceptionGroup("", [PanicException("x"), error])):
        with pytest.raises(type(raised)):
            as_error(raised)


def test_a_panic_becomes_an_error_without_its_text() -> None:
    for raised in (PanicException(SECRET), BaseExceptionGroup("", [PanicException(SECRET)])):
        error = as_error(raised)
        assert isinstance(error, LibraryPanicError) and SECRET not in str(error)
    assert as_error(known := ValueError()) is known
