"""Work lists of the attention kernels; and every kernel against its twin, in Triton's interpreter and on a GPU.

Kernels are bound to the interpreter when they are defined, so the cases run in processes of their own: this one keeps
a Triton that compiles.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from engine.triton_kernels import configs, triton_kernels, twins
from engine.triton_kernels.work import DecodeWork, PrefillWork

CASES = [("attention",), ("engine",), ("cache", "int8", "rows", "lora"), ("experts",)]
"""Names of files kernel_cases_<name>.py that run in one process."""
TINY = (
    "attention.py::test_prefill_sees_a_window[0-70]",
    "cache.py::test_unit_copy_within_the_pool",
    "experts.py::test_grouped_product[(5, 8, 2, 40, 72)-torch.float16]",
    "int8.py::test_prefill_reads_no_scale_before_its_window[0]",
    "lora.py::test_lora_add[24-40-torch.float32]",
    "rows.py::test_layer_norm_of_rows_far_from_zero",
)
"""One case of each kind of kernel, which takes the interpreter less than 2 s."""
CPU = torch.device("cpu")
TESTS = Path(__file__).parent


def run_cases(cases: Iterable[str], interpret: bool) -> None:
    pytest.importorskip("triton")
    # The processor time counts for the test that starts the cases, not for each case.
    environment = {name: value for name, value in os.environ.items() if name != "TEST_CPU_SECONDS"}
    environment |= {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q"]
    command += ["--import-mode=importlib", "-x", *(str(TESTS / f"kernel_cases_{case}") for case in cases)]
    ended = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == 0, f"{cases}\n{ended.stdout[-6000:]}\n{ended.stderr[-2000:]}"
    assert " passed" in ended.stdout and "skipped" not in ended.stdout, ended.stdout


@pytest.mark.cpu_limit(15)
def test_a_case_of_each_kernel_in_the_interpreter() -> None:
    run_cases(TINY, interpret=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", CASES, ids="-".join)
@pytest.mark.parametrize("interpret", [
    pytest.param(True, marks=pytest.mark.slow, id="interpreter"), pytest.param(False, marks=pytest.mark.gpu, id="gpu"),
])  # fmt: skip
def test_kernels_equal_their_twins(names: tuple[str, ...], interpret: bool) -> None:
    run_cases([f"{name}.py" for name in names], interpret=interpret)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=0, max_size=40),
    spare_requests=st.integers(0, 3),
    spare_items=st.integers(0, 200),
    tile=st.sampled_from([16, 32, 64, 128]),
    min_split=st.sampled_from([1, 64, 256]),
)
@settings(max_examples=examples(200), deadline=None)
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
    for request, (first, count, target, _) in enumerate(ranges):
        assert target == request
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
@settings(max_examples=examples(100), deadline=None)
def test_prefill_work_covers_every_token_once(chunks: list[tuple[int, int]], tile: int) -> None:
    lengths = np.array([length for length, _ in chunks], np.int32)
    first = np.cumsum(lengths) - lengths
    table = np.array([(i, first[i], n, at) for i, (n, at) in enumerate(chunks)], np.int32).reshape(-1, 4)
    work = PrefillWork(len(chunks) + 1, int(lengths.sum()) // tile + len(chunks) + 2, tile, CPU)
    work.fill(np.array([[7, 0, tile, 5]], np.int32))  # to be forgotten
    work.fill(table)
    assert work.chunks.tolist() == [*table.tolist(), [0, 0, 0, 0]]
    expected = [(i, int(first[i]) + t, at + t) for i, (n, at) in enumerate(chunks) for t in range(n)]
    found = [(row, at + t, pos + t) for row, at, count, pos, *_ in work.items.tolist() for t in range(count)]
    assert sorted(found) == sorted(expected)
    assert all(item[4:] == [0, item[2] + item[3], 0, 1] for item in work.items.tolist() if item[2]), "nothing is split"
    counts = [count for _, _, count, *_ in work.items.tolist()]
    assert max(counts, default=0) <= tile and not any(counts[sum(map(bool, counts)) :])
    positions = [position for _, _, count, position, *_ in work.items.tolist() if count]
    assert positions == sorted(positions, reverse=True)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20_000)), min_size=0, max_size=12),
    size=st.sampled_from([9, 32, 128]),
    tile=st.sampled_from([16, 64, 128]),
    slots=st.integers(1, 40),
)
@settings(max_examples=examples(200), deadline=None)
def test_prefill_work_splits_long_pasts(chunks: list[tuple[int, int]], size: int, tile: int, slots: int) -> None:
    """Every token reads its context once; splits have rows of the partial results of their own, merges find them."""
    lengths = np.array([length for length, _ in chunks], np.int32)
    first = np.cumsum(lengths) - lengths
    table = np.array([(i, first[i], n, at) for i, (n, at) in enumerate(chunks)], np.int32).reshape(-1, 4)
    capacity = configs.prefill_items(int(lengths.sum()), len(chunks), size, slots)
    work = PrefillWork(len(chunks) + 1, capacity + 2 * slots + 9, size, CPU, slots=slots, tile=tile)
    work.fill(np.array([[7, 0, size, 50_000]], np.int32))  # to be forgotten
    work = work.head(len(chunks), capacity, int(lengths.sum()), fixed=False)
    work.fill(table)
    read: dict[int, list[tuple[int, int]]] = {}
    written: dict[int, list[int]] = {}
    for _, at, count, position, begin, end, where, splits in work.items.tolist():
        assert begin % tile == 0 and (begin < end <= position + count if count else end == 0)
        for token in range(at, at + count):
            read.setdefault(token, []).append((begin, end))
            if splits > 1:
                written.setdefault(token, []).append(where + (token - at) * splits)
    ends = {int(first[i]) + t: at + t + 1 for i, (n, at) in enumerate(chunks) for t in range(n)}
    assert read.keys() == ends.keys()
    for token, ranges in read.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] >= ends[token]
        assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]
    rows = [row for some in written.values() for row in some]
    assert len(set(rows)) == len(rows) and max(rows, default=-1) < work.partials
    merges = {token: list(range(at, at + n)) for at, n, token, _ in work.merges.tolist() if n != 1}
    assert merges == {token: sorted(some) for token, some in written.items()}
    assert work.merging == bool(merges)


def test_too_much_work_is_refused() -> None:
    with pytest.raises(AssertionError, match="more query tiles"):
        PrefillWork(4, 2, 16, CPU).fill(np.array([[0, 0, 49, 0]], np.int32))
    with pytest.raises(AssertionError, match="more requests"):
        DecodeWork(1, 4, 16, CPU).fill(np.zeros(2, np.int32), np.ones(2, np.int32))


def test_twins_take_what_kernels_take() -> None:
    """Backends call either module by name, so the parameters must agree; a kernel may take a `config` in addition."""
    pytest.importorskip("triton")
    kernels = triton_kernels()
    for name in twins.__all__:
        given, twin = (
            [(each.name.lstrip("_"), each.kind, each.default) for each in signature(function).parameters.values()]
            for function in (getattr(kernels, name), getattr(twins, name))
        )
        assert [each for each in given if each[0] != "config"] == twin, name
