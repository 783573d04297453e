"""Work lists of the attention kernels; and every kernel against its twin, in Triton's interpreter and on a GPU.

Kernels are bound to the interpreter when they are defined, so the cases run in processes of their own: this one keeps
a Triton that compiles.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.triton_kernels.work import DecodeWork, PrefillWork

CASES = [("attention", "decode"), ("attention", "prefill"), ("cache", ""), ("int8", ""), ("rows", ""), ("engine", "")]
"""(file kernel_cases_<name>.py, which tests of it)"""
CPU = torch.device("cpu")
TESTS = Path(__file__).parent


def run_cases(name: str, which: str, interpret: bool) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q"]
    command += ["--import-mode=importlib", "-x", "-k", which, str(TESTS / f"kernel_cases_{name}.py")]
    ended = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == 0, f"{name}\n{ended.stdout[-6000:]}\n{ended.stderr[-2000:]}"
    assert " passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "which"), CASES)
def test_kernels_equal_their_twins_in_the_interpreter(name: str, which: str) -> None:
    run_cases(name, which, interpret=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "which"), CASES)
def test_kernels_equal_their_twins_on_a_gpu(name: str, which: str) -> None:
    run_cases(name, which, interpret=False)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=0, max_size=40),
    spare_requests=st.integers(0, 3),
    spare_items=st.integers(0, 200),
    tile=st.sampled_from([16, 32, 64, 128]),
    min_split=st.sampled_from([1, 64, 256]),
)
@settings(max_examples=200, deadline=None)
def test_decode_work_covers_every_context_once(
    lengths: list[int], spare_requests: int, spare_items: int, tile: int, min_split: int
) -> None:
    capacity = len(lengths) + spare_requests
    work = DecodeWork(capacity, capacity + spare_items, tile, CPU, min_split)
    work.fill(np.full(max(capacity, 1), 9, np.int32)[:capacity], np.full(capacity, 3000, np.int32))  # to be forgotten
    rows = np.arange(len(lengths), dtype=np.int32)[::-1] * 2
    work.fill(rows, np.array(lengths, np.int32))
    items, ranges, requests = work.items.tolist(), work.ranges.tolist(), work.requests.tolist()
    assert requests == [[int(row), n] for row, n in zip(rows, lengths, strict=True)] + [[0, 0]] * spare_requests
    used = 0
    for request, (first, count) in enumerate(ranges):
        end = 0
        for item in items[first : first + count]:
            assert item[:3] == [request, requests[request][0], end] and end % tile == 0 and item[3] > end
            end = item[3]
        assert end == requests[request][1]
        used += count
    assert all(item[0] == -1 for item in items[used:])
    splits = [end - begin for request, _, begin, end in items[:used] if end < requests[request][1]]
    assert all(2 * split >= min_split for split in splits)


def test_decode_work_uses_its_room() -> None:
    work = DecodeWork(4, 68, 64, CPU)
    work.fill(np.array([0], np.int32), np.array([100_000], np.int32))
    assert work.ranges[0].tolist()[1] >= 60, "one long context is split over the device"
    work.fill(np.array([0], np.int32), np.array([300], np.int32))
    assert work.ranges[0].tolist()[1] == 5, "of a short one every program has a tile at least"


@given(
    chunks=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=0, max_size=20),
    tile=st.sampled_from([9, 18, 32, 128]),
)
@settings(max_examples=100, deadline=None)
def test_prefill_work_covers_every_token_once(chunks: list[tuple[int, int]], tile: int) -> None:
    lengths = np.array([length for length, _ in chunks], np.int32)
    first = np.cumsum(lengths) - lengths
    table = np.array([(i, first[i], n, at) for i, (n, at) in enumerate(chunks)], np.int32).reshape(-1, 4)
    work = PrefillWork(len(chunks) + 1, int(lengths.sum()) // tile + len(chunks) + 2, tile, CPU)
    work.fill(np.array([[7, 0, tile, 5]], np.int32))  # to be forgotten
    work.fill(table)
    assert work.chunks.tolist() == [*table.tolist(), [0, 0, 0, 0]]
    expected = [(i, int(first[i]) + t, at + t) for i, (n, at) in enumerate(chunks) for t in range(n)]
    found = [(row, at + t, pos + t) for row, at, count, pos in work.items.tolist() for t in range(count)]
    assert sorted(found) == sorted(expected)
    counts = [count for _, _, count, _ in work.items.tolist()]
    assert max(counts, default=0) <= tile and not any(counts[sum(map(bool, counts)) :])
    positions = [position for _, _, count, position in work.items.tolist() if count]
    assert positions == sorted(positions, reverse=True)


def test_too_much_work_is_refused() -> None:
    with pytest.raises(AssertionError, match="more query tiles"):
        PrefillWork(4, 2, 16, CPU).fill(np.array([[0, 0, 49, 0]], np.int32))
    with pytest.raises(AssertionError, match="more requests"):
        DecodeWork(1, 4, 16, CPU).fill(np.zeros(2, np.int32), np.ones(2, np.int32))
