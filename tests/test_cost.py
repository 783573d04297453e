"""Work for a body or a batch file grows no faster than its size, and no number makes it endless.

The fields come from the wire models, so a new field is measured without a change here."""

import functools
import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from cost_sites import USER, Growth, Site, Walker, grown_schemas, growths
from cost_tools import Gateway, Work, check, cost_of, open_gateway
from fake_engine import MODEL
from support.tables import for_each

from engine.api import TokenCosts
from engine.client import EngineStats
from engine.errors import InvalidRequestError
from gateway.batch.forecast import Forecast
from gateway.batch.input import check_input
from gateway.batch.line import read_head
from gateway.batch.run import LineSizes
from gateway.endpoints import ENDPOINTS, POSTS
from gateway.generate.grammars import Function
from gateway.generate.tool_formats import END_THINK, FORMATS
from gateway.generate.validation import JsonPost, parse_json
from gateway.store.objects import BatchJob, BatchStatus, Usage

SMALL_CONTEXT, LARGE_CONTEXT = 512, 1 << 20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


# Bodies

WALKERS = {post.path: Walker.of(post.body) for post in POSTS}
ANSWERING = {"CountRequest": "MessagesRequest", "TokenizeChatRequest": "ChatCompletionRequest"}
"""Bodies of endpoints that only count tokens, and the body whose code reads the same fields before it answers."""


def sites() -> Iterator[tuple[JsonPost[Any], Site]]:
    """Yield each field of each body once, of fields that two endpoints read with the same code only the first."""
    known = set()
    for post in POSTS:
        for site in WALKERS[post.path].sites():
            body, _, rest = site.name.partition(".")
            if not {site.name, f"{ANSWERING.get(body)}.{rest}"} & known:
                yield post, site
        known |= {site.name for site in WALKERS[post.path].sites()}


SITES = list(sites())
GROWING = [(post, site) for post, site in SITES if site.kind != "number"]


@pytest.mark.slow
@pytest.mark.parametrize(("post", "site"), GROWING, ids=[f"{post.path}-{site.name}" for post, site in GROWING])
def test_bodies(gateway: Gateway, post: JsonPost[Any], site: Site) -> None:
    for growth in growths(site, WALKERS[post.path]):
        check_growth(gateway, post, site, growth)


def check_growth(gateway: Gateway, post: JsonPost[Any], site: Site, growth: Growth) -> None:
    def make(n: int, pad: int = 1) -> Work:
        raw = orjson.dumps(site.put(growth.make(n, pad)))
        return functools.partial(gateway.post, post.path, raw)

    gateway.set_context(LARGE_CONTEXT)
    check(make, growth.lines, 0, site.most, growth.name)
    if growth.pad > 1:
        gateway.set_context(SMALL_CONTEXT)
    check(functools.partial(make, pad=growth.pad), 0, growth.cpu, None, growth.name)


CLASSED = ("ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "MessagesRequest", "ResponsesRequest")
UNREACHED = {
    "ChatCompletionRequest.tool_choice.allowed_tools.tools",
    "ChatCompletionRequest.tool_choice.allowed_tools.tools[].function.name",
    "ChatCompletionRequest.tool_choice.function.name",
    "ResponsesRequest.tools[].type",
    "ResponsesRequest.tool_choice.name",
    "MessagesRequest.tools[].type",
    *(f"{request}.tidemill.class" for request in CLASSED),
}
"""Valid only as names of tools of the request or of classes, or as a type of tool that another server runs."""


@pytest.mark.slow
def test_every_place_is_reached(gateway: Gateway) -> None:
    """Every field has a large value that is answered with 200: a refusal hides the work behind it."""
    gateway.set_context(LARGE_CONTEXT)
    missing = {site.name for _, site in SITES if site.kind in ("text", "list", "map") and site.field != "model"}
    for post, site in GROWING:
        for growth in growths(site, WALKERS[post.path]):
            gateway.post(post.path, orjson.dumps(site.put(growth.make(4, 1))))
            if gateway.status == 200:
                missing.discard(site.name)
    assert missing == UNREACHED


# Functions, as grammars of answers that call them


@pytest.mark.slow
@for_each(("schema", "required"), [("everything", False), *((schema, True) for schema in grown_schemas(1))])
@pytest.mark.parametrize("name", FORMATS)
def test_functions(name: str, schema: str, required: bool) -> None:
    def make(n: int) -> Work:
        functions = [Function("f", grown_schemas(n)[schema])]

        def work() -> int:
            try:
                return len(FORMATS[name].grammar(functions, {END_THINK: 1}, True, required))
            except ValueError:  # the format cannot enforce the schema
                return 0

        return work

    check(make, 16, 1000)


# Numbers

EXTREMES = (
    "0", "-1", "1.5", "-1e30", "1e30", "1e308", "-1e308", "1e999", "NaN", "-Infinity", str(2**31), str(2**63),
    "-" + str(2**63), "9" * 30, "true", "null", '"-inf"', '"nan"', '"9"', "[]", "{}",
)  # fmt: skip
"""Numbers, and values in the place of numbers, as JSON text."""
NUMBER_LINES = 100_000
"""Limit of executed lines for a body with an extreme number; an ordinary body takes 5,000."""
NUMBERS = [(post, site) for post, site in SITES if site.kind == "number"]


def with_number(site: Site, number: str) -> bytes:
    return orjson.dumps(site.put("@")).replace(b'"@"', number.encode())


IN_LINES = [(post, site) for post, site in NUMBERS if post.path in ENDPOINTS]
IN_BODIES = [pair for pair in NUMBERS if pair not in IN_LINES]


@for_each(("post", "site"), IN_BODIES)
def test_numbers_in_bodies(gateway: Gateway, post: JsonPost[Any], site: Site) -> None:
    gateway.set_context(LARGE_CONTEXT)
    for number in EXTREMES:
        cost_of(functools.partial(gateway.post, post.path, with_number(site, number)), NUMBER_LINES)
        assert gateway.status in (200, 400), number


@pytest.mark.parametrize(("post", "site"), IN_LINES, ids=[site.name for _, site in IN_LINES])
def test_numbers_in_bodies_and_lines(gateway: Gateway, tmp_path: Path, post: JsonPost[Any], site: Site) -> None:
    """A number that a body must not have is refused in a line with the same error, and no forecast uses it."""
    path = tmp_path / "input.jsonl"
    envelope = orjson.dumps({"custom_id": "a", "method": "POST", "url": post.path, "body": "@"})
    gateway.set_context(LARGE_CONTEXT)
    for number in EXTREMES:
        raw = with_number(site, number)
        cost_of(functools.partial(gateway.post, post.path, raw), NUMBER_LINES)
        assert gateway.status in (200, 400), number
        path.write_bytes(envelope.replace(b'"@"', raw) + b"\n")
        cost_of(functools.partial(foresee, path, post.path), NUMBER_LINES)
        if check_input(io.BytesIO(path.read_bytes()), post.path, 100, 1 << 20).errors:
            assert gateway.status == 400, number
            continue
        answer = gateway.line(post.path, parse_json(raw))
        assert answer.status == gateway.status, number
        head = read_head(path, post.path)
        assert head is not None
        if answer.status == 200:
            assert min(head.answers) >= 0.0, number
        else:
            assert answer.body["error"]["message"] == orjson.loads(gateway.answer)["error"]["message"], number
            with suppress(InvalidRequestError):
                post.parse(raw)
                continue  # valid, but too much for the model
            assert head.answers == (0.0,), number


def foresee(path: Path, endpoint: str) -> None:
    """Judge the outlook of a batch by the first lines of its file, before and after it runs."""
    head, forecast = read_head(path, endpoint), Forecast(lambda: EngineStats(token_costs=TokenCosts(1e-4, 1e-2)))
    waiting, running = (batch(name, total=5, endpoint=endpoint) for name in "ab")
    update(forecast, [(running, head or LineSizes(20.0))], 1.0)
    forecast.first(waiting, 100, 2.0, head).notes(waiting)
    forecast.line_ended(20, Usage(10, 0, 5))
    update(forecast, [(each, head or LineSizes(20.0)) for each in (waiting, running)], 60.0)
    for each in (waiting, running):
        orjson.dumps(each.as_json(forecast.outlooks[each.id].notes(each)))


def update(forecast: Forecast, jobs: list[tuple[BatchJob, LineSizes]], now: float) -> None:
    for _ in forecast.update(jobs, now):
        pass


def batch(name: str, tenant: str = "t", total: int = 0, endpoint: str = "/v1/chat/completions") -> BatchJob:
    return BatchJob(name, tenant, endpoint, "file-a", "24h", 0, 86_400, BatchStatus.IN_PROGRESS, total=total)


# Batches


@pytest.mark.parametrize("tenants", [1, 7, 10**9])
def test_outlook_of_many_batches(tenants: int) -> None:
    def make(n: int) -> Work:
        costs, lengths = TokenCosts(1e-4, 1e-2), LineSizes(100.0)
        jobs = [(batch(f"b{i}", f"t{i % tenants}", 1 + i * 7 % 1000), lengths) for i in range(n)]

        def work() -> None:
            forecast = Forecast(lambda: EngineStats(token_costs=costs))
            forecast.line_ended(20, Usage(10, 0, 5))
            forecast.pace.seconds = 10.0
            update(forecast, jobs, 1.0)
            forecast.first(batch("new"), 1000, 2.0)

        return work

    check(make, 40, 0)


def lines_of(*envelopes: Any) -> bytes:
    return b"".join(orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE) for each in envelopes)


def line(index: int = 0, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [USER]}
    return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


FILES = {
    "lines": lambda n: lines_of(*(line(i) for i in range(n))),
    "equal ids": lambda n: lines_of(*(line() for _ in range(n))),
    "blank lines": lambda n: b"\n" * n,
    "no end": lambda n: b"[" * n,
    "custom_id": lambda n: lines_of(line(custom_id="a" * n)),
    "names": lambda n: lines_of(line(**{f"n{i}": 0 for i in range(n)})),
    "messages": lambda n: lines_of(line(body={"messages": [USER] * n})),
    "parts": lambda n: lines_of(line(body={"messages": [{"content": [{}] * n}]})),
    "arrays": lambda n: lines_of(line(body={"prompt": [[]] * n})),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_batches(name: str) -> None:
    def make(n: int) -> Work:
        raw = FILES[name](n)
        return lambda: check_input(io.BytesIO(raw), "/v1/chat/completions", 10**6, 10**8)

    check(make, 100, 1000)
