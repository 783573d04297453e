"""Every trace format on small literals, and the operators as properties."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadgen import InputError, traces
from loadgen.traces import Content, Trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:16:00.0000000,12,0
"""
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01,9,7\n"
)
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,300,0,300,API log
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [4, 5, 6]}
{"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [4]}
"""


def columns(trace: Trace) -> list[tuple[float, int, int]]:
    rows = zip(trace.arrived_at, trace.input_tokens, trace.output_tokens, strict=True)
    return [(round(float(when), 4), int(size), int(out)) for when, size, out in rows]


TABLES = {
    "azure": (AZURE, [(0.0, 374, 44), (4.3146, 396, 109)]),
    "azure 2024": (AZURE_2024, [(0.0, 2162, 5), (0.9901, 9, 7)]),
    "burstgpt": (BURSTGPT, [(0.0, 472, 18), (40.0, 1087, 230)]),
    "native": ("arrived_at,input_tokens,output_tokens\n0,5,6\n2,7,8\n", [(0, 5, 6), (2, 7, 8)]),
    "lengths": ("input_tokens,output_tokens\n5,6\n", [(0.0, 5, 6)]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_sorted_from_zero_and_loses_failed_rows(name) -> None:
    text, rows = TABLES[name]
    trace = traces.parse(text, "csv")
    assert columns(trace) == rows and trace.timed == (name != "lengths")
    dropped = text.count("\n") - 1 - len(rows)
    assert trace.notes == ((f"{dropped} rows without prompt or answer dropped",) if dropped else ())


def test_mooncake_has_prefix_blocks_with_a_partial_last_one() -> None:
    trace = traces.parse(MOONCAKE, "jsonl")
    assert columns(trace) == [(0.0, 512, 3), (3.0, 1100, 9)]
    assert trace.content[0].segments == ((4, 512),)
    assert trace.content[1].segments == ((4, 512), (5, 512), (6, 76))
    native = traces.parse('{"arrived_at":1,"input_tokens":600,"output_tokens":6,"hash_ids":[1,2]}\n', "jsonl")
    assert native.content[0].segments == ((1, 512), (2, 88))


def test_mooncake_stamps_of_three_seconds_are_spread_within_them() -> None:
    rows = [{"timestamp": 3000 * (n // 10), "input_length": n + 1, "output_length": 1} for n in range(60)]
    trace = traces.parse("\n".join(map(json.dumps, rows)), "jsonl")
    stamps = (trace.input_tokens - 1) // 10 * 3
    inside = trace.arrived_at - stamps
    assert (inside >= 0).all() and (inside < 3).all() and len(set(inside)) == 60 and "rounded to 3 s" in trace.notes[-1]


def test_prompts_and_sharegpt() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}]
    prompts = traces.parse(
        "\n".join(json.dumps(row) for row in [{"prompt": "x" * 40, "max_tokens": 5}, {"messages": parts}]), "jsonl"
    )
    assert prompts.content[0].text == "x" * 40 and columns(prompts)[0] == (0.0, 10, 5)
    assert prompts.content[1].messages == (("user", "in parts"),)
    human = traces.parse(json.dumps({"task_id": "t", "prompt": "def f", "canonical_solution": "y" * 80}), "jsonl")
    assert int(human.output_tokens[0]) == 20
    talk = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "z" * 40}]
    shared = traces.parse(
        json.dumps([{"id": "1", "conversations": talk}, {"id": "2", "conversations": talk[:1]}]), "json"
    )
    assert len(shared) == 1 and shared.content[0].messages == (("user", "hello there"),)
    assert int(shared.output_tokens[0]) == 10 and any("estimates" in note for note in shared.notes)


@pytest.mark.parametrize("name,text", [("a.csv", AZURE), ("m.jsonl", MOONCAKE)])
def test_gzipped_files_read_the_same(tmp_path, name, text) -> None:
    plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert columns(traces.read(plain)) == columns(traces.read(packed))


def test_a_format_that_is_asked_for_names_the_column_that_is_not_there() -> None:
    with pytest.raises(InputError, match="row 1: no ContextTokens, only arrived_at, input_tokens, output_tokens"):
        traces.parse("arrived_at,input_tokens,output_tokens\n0,3,4\n", "csv", "azure")


PROMPT = '{"prompt": "a"}\n'
DAMAGED = [
    ("a,b\n1,2\n", "csv", "columns a, b; name them arrived_at"),
    ("", "csv", ""), ("{", "jsonl", ""), ("[1]", "jsonl", ""), ("{}", "json", ""),
    ('[{"id": 1}]', "json", ""), ('[{"conversations": [5, 6]}]', "json", "row 1"),
    ("input_tokens,output_tokens\nx,1\n", "csv", "row 1"), ("input_tokens,output_tokens\nnan,1\n", "csv", "row 1"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "csv", "row 1"), ('{"prompt": [1, 2]}', "jsonl", "row 1"),
    ("arrived_at,input_tokens,output_tokens\ninf,1,2\n", "csv", ""),
    (PROMPT + '{"prompt": 5}', "jsonl", "row 2"), (PROMPT + '{"messages": ["hi"]}', "jsonl", "row 2"),
    (PROMPT + '{"prompt": "a", "max_tokens": "five"}', "jsonl", "row 2"),
    (PROMPT + '{"prompt": "a", "max_tokens": -1}', "jsonl", "row 2"),
    (PROMPT + '{"messages": [{"content": [3]}]}', "jsonl", "row 2"),
    (PROMPT + '{"prompt": "a", "arrived_at": "soon"}', "jsonl", "row 2"),
    ('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": "abc"}', "jsonl", "row 1"),
    ('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": ["x"]}', "jsonl", "row 1"),
    ('{"timestamp": 0, "input_length": "9e", "output_length": 5, "hash_ids": [1]}', "jsonl", "row 1"),
    ('{"input_tokens": 1e20, "output_tokens": 5}', "jsonl", "row 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "suffix", "place"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_a_named_error_with_its_row(text, suffix, place) -> None:
    with pytest.raises(InputError, match=place or None):
        traces.parse(text, suffix)


@pytest.mark.parametrize("cut", [lambda data: data[:-9], lambda data: data[:30] + bytes([data[30] ^ 255]) + data[31:]])
def test_a_damaged_archive_is_a_named_error(tmp_path, cut) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(cut(gzip.compress(AZURE.encode() * 50)))
    with pytest.raises(InputError, match="cannot read"):
        traces.read(path)


lengths = st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 3000), st.integers(1, 500)), min_size=2, max_size=40)


@st.composite
def traces_of(draw) -> Trace:
    rows = draw(lengths)
    assume(max(row[0] for row in rows) - min(row[0] for row in rows) > 1)
    content = tuple(Content(segments=((index % 3, max(1, row[1] // 2)),)) for index, row in enumerate(rows))
    times, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return traces.build(times, inputs, outputs, content)


def pairs(trace: Trace) -> list[tuple[int, int, Content]]:
    return list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), trace.content, strict=True))


def is_sound(trace: Trace) -> bool:
    columns = (len(trace.arrived_at), len(trace.input_tokens), len(trace.output_tokens), len(trace.content))
    return len(set(columns)) == 1 and bool((np.diff(trace.arrived_at) >= 0).all())


@given(traces_of(), st.floats(0, 500), st.floats(1, 500))
def test_window_keeps_exactly_what_lies_inside(trace, start, length) -> None:
    cut = traces.window(trace, start, start + length)
    inside = [(when >= start) and (when < start + length) for when in trace.arrived_at]
    assert pairs(cut) == [pair for pair, keep in zip(pairs(trace), inside, strict=True) if keep]
    assert is_sound(cut) and ((cut.arrived_at >= 0) & (cut.arrived_at <= length)).all()


@given(traces_of(), st.floats(0.05, 1), st.integers(0, 5))
def test_thin_keeps_a_subsequence_in_place(trace, share, seed) -> None:
    thinned = traces.thin(trace, share, seed)
    rows = list(zip(trace.arrived_at, pairs(trace), strict=True))
    iterator = iter(rows)
    assert all(row in iterator for row in zip(thinned.arrived_at, pairs(thinned), strict=True))
    assert thinned.span == trace.span
    assert share < 1 or len(thinned) == len(trace)


@given(traces_of(), st.floats(0.1, 10))
def test_stretch_scales_times_and_undoes(trace, factor) -> None:
    stretched = traces.stretch(trace, factor)
    assert stretched.rate == pytest.approx(trace.rate / factor)
    assert traces.stretch(stretched, 1 / factor).arrived_at == pytest.approx(trace.arrived_at)
    assert pairs(stretched) == pairs(trace)


@given(traces_of(), st.floats(0, 5), st.integers(0, 5))
def test_jitter_moves_nobody_far_and_loses_nobody(trace, width, seed) -> None:
    moved = traces.jitter(trace, width, seed)
    assert is_sound(moved) and sorted(map(str, pairs(moved))) == sorted(map(str, pairs(trace)))
    # Sorted columns stay within the width of each other.
    shift = moved.arrived_at - trace.arrived_at
    assert (shift >= -1e-9).all() and (shift <= width + 1e-9).all()


@given(traces_of(), st.floats(0.1, 4), st.floats(0.1, 4))
def test_scale_changes_lengths_alone(trace, inputs, outputs) -> None:
    scaled = traces.scale(trace, inputs, outputs)
    assert (scaled.arrived_at == trace.arrived_at).all()
    assert (scaled.input_tokens >= 1).all() and (np.abs(scaled.input_tokens - trace.input_tokens * inputs) <= 1).all()
    assert (np.abs(scaled.output_tokens - trace.output_tokens * outputs) <= 1).all()


def test_operators_compose_from_text_and_are_noted() -> None:
    trace = traces.parse(BURSTGPT, "csv")
    done = traces.apply(trace, "stretch=0.5 ,scale=0.5:2", 0)
    assert columns(done)[:2] == [(0.0, 236, 36), (20.0, 544, 460)] and done.notes[-1] == "scale=0.5:2"
    for bad in (
        "shrink=2",
        "thin=0",
        "thin=2",
        "window=5:5",
        "stretch=x",
        "scale=-1",
        "jitter=-1",
        "window=1",
    ):
        with pytest.raises(InputError):
            traces.apply(trace, bad, 0)


def test_to_rate_thins_by_default_and_says_when_it_cannot() -> None:
    times = np.arange(4000) * 0.1
    trace = traces.build(times, np.full(4000, 5), np.full(4000, 5))
    assert traces.to_rate(trace, 2.0, seed=1).rate == pytest.approx(2.0, rel=0.05)
    assert traces.to_rate(trace, 50.0, seed=1, by="stretch").rate == pytest.approx(50.0)
    with pytest.raises(InputError, match="stretch"):
        traces.to_rate(trace, 50.0, seed=1)
