"""The event rules of a stream, on recorded bytes with an injected clock."""

import random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import StreamEvents, whole_answer
from loadgen.records import RequestRecord, to_line


def record() -> RequestRecord:
    return RequestRecord(0, "online", scheduled_at=1.0, input_asked=10, output_asked=5)


def event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else orjson.dumps(body)) + b"\n\n"


def delta(finish: str | None = None, usage: int | None = None, **fields: object) -> bytes:
    chunk: dict[str, object] = {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 10, "completion_tokens": usage}
    return event(chunk)


def play(*timed: tuple[float, bytes], end: float = 9.0, silent_tokens: bool = False) -> RequestRecord:
    """Feeds each piece of bytes at its time; the stream closes at `end`."""
    found = record()
    found.sent_at = 1.5
    events = StreamEvents(found, silent_tokens=silent_tokens)
    for when, data in timed:
        events.feed(data, when)
    events.close(end)
    return found


DONE = event(b"[DONE]")


def test_role_only_empty_finish_and_usage_chunks_are_no_token_events() -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    found = play(
        (2.0, delta(role="assistant", content="")),
        (2.5, delta(role="assistant", content=None)),
        (3.0, delta(content="a")),
        (3.25, delta(content="")),
        (3.5, delta(content="b")),
        (4.0, delta(finish="stop")),
        (4.5, event({"choices": [], "usage": usage})),
        (5.0, DONE),
    )
    assert found.chunk_at == [3.0, 3.5] and found.chunk_tokens == [1, 1]
    assert found.ttft == 2.0 and found.ttft_sent == 1.5 and found.e2e == 2.5 and found.tpot == 0.5
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (12, 2, 4)
    assert found.outcome == "ok" and found.finish_reason == "stop" and found.ended_at == 9.0


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "x"},
        {"reasoning": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_content_reasoning_and_tool_calls_are_token_events(fields) -> None:
    assert play((2.0, delta(**fields)), (3.0, DONE)).chunk_at == [2.0]


def test_a_chunk_of_k_tokens_is_one_gap_and_k_minus_1_zeros() -> None:
    found = play(
        (2.0, delta(content="a", usage=2)),
        (2.5, delta(content="b", usage=3)),
        (3.5, delta(content="é", usage=6, finish="length")),
        (3.5, DONE),
    )
    assert found.chunk_tokens == [2, 1, 3]
    assert found.gaps().tolist() == [0.0, 0.5, 1.0, 0.0, 0.0]
    assert found.tpot == pytest.approx(1.5 / 5)


def test_without_usage_each_chunk_is_one_token() -> None:
    found = play((2.0, delta(content="abc")), (3.0, delta(content="d", finish="stop")))
    assert found.chunk_tokens == [1, 1] and found.output_tokens == 2 and found.input_tokens is None
    assert found.outcome == "ok" and found.prompt_tokens == 10


def test_ends_that_are_not_ok() -> None:
    cut = play((2.0, delta(content="a")))
    assert cut.outcome == "cut" and cut.first_token_at == 2.0
    error = play((2.0, delta(content="a")), (3.0, event({"error": {"message": "the engine died", "code": None}})))
    assert error.outcome == "stream_error" and error.error == "the engine died"
    assert play((2.0, delta(finish="stop")), (2.0, DONE)).outcome == "empty"
    assert play((2.0, event(b"{nonsense")), (2.0, DONE)).outcome == "stream_error"


def test_comments_other_fields_and_carriage_returns_are_tolerated() -> None:
    data = (
        b": ping\r\nevent: message\r\ndata:"
        + orjson.dumps({"choices": [{"text": "x"}]})
        + b"\r\n\r\ndata: [DONE]\r\n\r\n"
    )
    found = play((2.0, data))
    assert found.chunk_at == [2.0] and found.outcome == "ok"


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_events_may_be_split_anywhere(seed: int, pieces: int) -> None:
    data = b"".join(delta(content="é", usage=n + 1) for n in range(6)) + delta(finish="stop") + DONE
    cuts = sorted(random.Random(seed).randrange(len(data)) for _ in range(pieces))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    found = play(*((2.0 + number, part) for number, part in enumerate(parts)))
    assert sum(found.chunk_tokens) == 6 and found.outcome == "ok"
    assert found.chunk_at == sorted(found.chunk_at)


def test_an_answer_that_is_not_streamed_arrives_whole() -> None:
    found = record()
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    whole_answer(found, {"choices": [{"text": "abcd", "finish_reason": "length"}], "usage": usage}, 3.0)
    assert found.outcome == "ok" and found.ttft == 2.0 and found.gaps().tolist() == [0.0, 0.0, 0.0]


def test_records_survive_their_file_form() -> None:
    found = play((2.0, delta(content="a", usage=1)), (2.5, delta(content="b", usage=2)), (3.0, DONE))
    row = orjson.loads(to_line(found))
    row["service_class"] = row.pop("class")
    assert RequestRecord(**row) == found


def test_a_token_without_text_counts_by_its_usage_where_that_is_asked_for() -> None:
    """Half a character: the second token's chunk is empty, the third brings the whole."""
    chunks = [
        (2.0, delta(role="assistant", content="", usage=0)),
        (3.0, delta(content="a", usage=1)),
        (4.0, delta(content="", usage=2)),
        (5.0, delta(content="é", usage=3)),
        (6.0, delta("length", usage=3)),
        (6.5, event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}})),
        (7.0, DONE),
    ]
    usual, silent = (play(*chunks, silent_tokens=asked) for asked in (False, True))
    assert (usual.chunk_at, usual.chunk_tokens) == ([3.0, 5.0], [1, 2])
    assert (silent.chunk_at, silent.chunk_tokens) == ([3.0, 4.0, 5.0], [1, 1, 1])
    assert usual.output_tokens == silent.output_tokens == 3 and usual.ok and silent.ok
