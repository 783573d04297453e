"""Shared by the programs: the addresses of the servers, and steps that each print one line for the test."""

import asyncio
import importlib.metadata
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

DEMO_URL, PUPPET_URL = os.environ["DEMO_URL"], os.environ["PUPPET_URL"]
DEMO, PUPPET = "tidemill-demo", "puppet"
ASK = "What is the capital of France?"
PERSON = "Who is this? Ida is 71 and lives in Bern."
WEATHER = "How is the weather in Seoul?"
LONGEST = 240  # characters of a reason


def plan(*turns: Any) -> str:
    """Return text for a message that tells the puppet its turns: a string, or calls as `call` makes them."""
    return " ".join(f"<<{json.dumps(turn)}>>" for turn in turns)


def call(name: str, /, **arguments: Any) -> list[Any]:
    return [name, arguments]


def begin(*distributions: str, version: str = "") -> None:
    """Print the version of the client: those of the named distributions, or `version`."""
    names = [f"{name} {importlib.metadata.version(name)}" for name in distributions[1:]]
    own = [importlib.metadata.version(distributions[0])] if distributions else [version]
    _say(", ".join(own + names))


def step(what: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function, which raises when the answer is not the expected one."""

    def run(function: Callable[[], Any]) -> None:
        try:
            _finish(function())
        except Exception as error:
            traceback.print_exc()
            _say([what, f"failed: {type(error).__name__}: {_brief(error)}"])
        else:
            _say([what, "passed"])

    return run


def refused(what: str, *words: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function, which must raise an error whose text holds all `words`."""

    def run(function: Callable[[], Any]) -> None:
        try:
            _finish(function())
        except Exception as error:
            text = _brief(error)
            missing = [word for word in words if word not in text]
            _say([what, f"failed: {text} (without {missing})" if missing else f"refused: {text}"])
        else:
            _say([what, "failed: the server did not refuse it"])

    return run


def end() -> None:
    _say("end")


def _finish(result: Any) -> None:
    if inspect.isawaitable(result):

        async def wait() -> None:
            await result

        asyncio.run(wait())


def _brief(error: Exception) -> str:
    """Return the server's message where the error holds one, else the error's own text."""
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        body = body.get("error", body)
        return str(body.get("message"))[:LONGEST]
    return " ".join(str(error).split())[:LONGEST]


def _say(line: Any) -> None:
    print("\n" + json.dumps({"client step": line}), flush=True)
