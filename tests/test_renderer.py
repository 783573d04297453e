"""The limits of a rendering hold at each request, for any result of the template's probe."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders as folders
from fake_engine import FakeEngine, say, serve
from support.http import post

from engine.errors import InvalidRequestError
from engine.text.renderer import TemplateRenderer, _Process
from engine.text.tokenizer import Tokenizer

ENDLESS = "{%- for a in range(99999) %}{%- for b in range(99999) %}{%- endfor %}{%- endfor %}"
DOUBLING = "{%- set x = namespace(y='x' * 1000000) %}{%- for a in range(30) %}{%- set x.y = x.y + x.y %}{%- endfor %}"
PLAIN = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(cpu_seconds=3.0)
    yield made
    made.close()


def render(renderer: TemplateRenderer, template: str, content: Any = "x", **values: Any) -> str:
    return renderer.render(template, [{"role": "user", "content": content}], values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "CPU time"),
        (DOUBLING, "512 MiB of memory"),
        ("{{ messages[0].content | center(3000000000) }}", "512 MiB of memory"),
        ("{{ 9 ** (99999999 + messages | length) }}", "CPU time"),
        ("{%- for a in range(9999) %}{{ 'y' * 2000 }}{%- endfor %}", "19,998,000 characters"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_explodes_is_refused_and_the_next_is_rendered(
    renderer: TemplateRenderer, template: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(renderer, template)
    assert caught.value.param == "messages"
    assert render(renderer, PLAIN) == "x"


@pytest.mark.parametrize("content", ["\ud800", "\n\r\u2028\0", "é" * 100_000, "[" * 5000])
def test_any_text_survives(renderer: TemplateRenderer, content: str) -> None:
    assert render(renderer, PLAIN, content) == content


def test_messages_too_deep_to_send_are_refused(renderer: TemplateRenderer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="RecursionError"):
        render(renderer, PLAIN, deep)


@pytest.mark.slow
def test_a_process_that_was_ended_is_replaced(renderer: TemplateRenderer) -> None:
    assert render(renderer, PLAIN) == "x"
    os.kill(renderer._idle[-1]._child.pid, signal.SIGKILL)
    assert render(renderer, PLAIN) == "x"


@pytest.mark.slow
def test_an_exploding_template_holds_up_no_other(renderer: TemplateRenderer) -> None:
    slow = TemplateRenderer(cpu_seconds=10.0)

    def explode() -> None:
        with pytest.raises(InvalidRequestError):
            render(slow, ENDLESS)

    exploding = threading.Thread(target=explode)
    exploding.start()
    assert render(slow, PLAIN) == "x" and exploding.is_alive()
    slow.close()
    exploding.join()
    slow.close()


@pytest.mark.slow
async def test_a_chat_whose_template_explodes_gets_an_answer(tmp_path: Path) -> None:
    template = "{%- if 'boom' in messages[0].content %}" + DOUBLING + "{%- endif %}" + PLAIN
    tokenizer = Tokenizer.load(folders.byte_level(tmp_path, template))
    async with serve(FakeEngine(say(tokenizer, "done")), tokenizer) as served:
        for content, status in (("hello", 200), ("boom", 400), ("hello", 200)):
            answer = await post(served, messages=[{"role": "user", "content": content}])
            assert answer.status_code == status, answer.text
        assert "memory" not in answer.text


@pytest.mark.slow
def test_the_answer_of_an_interrupted_rendering_is_not_taken_for_the_next_one(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = _Process.ask

    def interrupted(process: _Process, job: bytes) -> tuple[str, str]:
        assert process._child.stdin is not None
        process._child.stdin.write(job)
        process._child.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(_Process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(renderer, PLAIN, "first")
    monkeypatch.setattr(_Process, "ask", ask)
    assert [render(renderer, PLAIN, each) for each in ("second", "third")] == ["second", "third"]
