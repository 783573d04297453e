"""Schemathesis over the OpenAPI document of the whole application: every answer is one of the contract.

A failure is a 5xx, a 422, a content type or an error object that the document does not have, or a temporary file left
behind.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_tools import batch_server, leftovers
from hypothesis import HealthCheck, Phase, given, settings
from test_tenants import ROUTES, WEB

from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer
) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """A server in a thread of its own: schemathesis is synchronous."""
    root = tmp_path_factory.mktemp("openapi") / "state"
    ready, done = threading.Event(), threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with batch_server(tokenizer, root, "hello") as (served, _):
            found.extend([served.url, served.app.openapi()])
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield found[0], found[1], root
    done.set()
    thread.join()


GENERATION = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
OPERATIONS = sorted(ROUTES.keys() - WEB)
# Where something can be wrong: elsewhere every text is as good as any other.
REFUSABLE = [
    pair
    for pair in OPERATIONS
    if pair[1] in {"/v1/files", "/v1/batches", "/v1/tables", "/v1/messages/batches", *GENERATION}
]
CASES = [(*pair, "positive") for pair in OPERATIONS]
CASES += [(*pair, "negative") for pair in REFUSABLE]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_of_the_contract(
    server: tuple[str, dict[str, Any], Path], method: str, path: str, mode: str
) -> None:
    """Send requests that the document allows, and requests that it does not allow."""
    import schemathesis
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    url, document, root = server
    case_strategy = schemathesis.openapi.from_dict(document)[path][method].as_strategy(
        generation_mode=schemathesis.GenerationMode(mode)
    )

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=case_strategy)
    def send(case: Any) -> None:
        response = case.call(base_url=url)
        assert response.status_code < 500 and response.status_code != 422, response.content[:500]
        case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])
        until_tidy(root)

    send()


def until_tidy(root: Path) -> None:
    """Wait until no temporary file is left: the batches that were created write their results meanwhile."""
    end = time.monotonic() + 30
    while leftovers(root)["tmp"]:
        assert time.monotonic() < end, "a temporary file is left behind"
        time.sleep(0.01)


def test_no_operation_is_left_out(server: tuple[str, dict[str, Any], Path]) -> None:
    found = {(method.upper(), path) for path, methods in server[1]["paths"].items() for method in methods}
    assert found == set(OPERATIONS)
    assert "multipart/form-data" in server[1]["paths"]["/v1/files"]["post"]["requestBody"]["content"]
