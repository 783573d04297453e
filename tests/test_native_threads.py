"""The threads of the native kernels: the same results at any number, through resizing, stops and forks."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from native_build import library_file, library_of, native_library

from engine.execution.cpu.native.library import Level, Team
from engine.execution.cpu.native.linear import Native, NativeLinear

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(300, 64, generator=GENERATOR)
X = torch.randn(70, 64, generator=GENERATOR)


def make(threads: int) -> tuple[NativeLinear, Team]:
    library = native_library()
    team = Team(library, threads)
    return NativeLinear(Native(library, Level.AVX2, team), WEIGHT, None), team


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_any_number_of_threads_gives_the_same() -> None:
    expected = make(1)[0](X)
    for threads in (2, 3, 8):
        layer, _ = make(threads)
        for _ in range(20):
            assert torch.equal(layer(X), expected)


def test_threads_start_with_work_and_end_with_their_team() -> None:
    before = num_threads()
    layer, team = make(4)
    assert num_threads() == before
    layer(X)
    assert num_threads() == before + 3
    team.resize(2)
    assert team.threads == 2
    layer(X)
    assert num_threads() == before + 1
    del layer, team
    assert num_threads() == before


def test_sizes_out_of_range_are_brought_into_it() -> None:
    team = Team(native_library(), 0)
    assert team.threads == 1
    team.resize(100_000)
    assert team.threads == 256


def test_calls_from_several_threads_take_turns() -> None:
    layer, _ = make(3)
    expected = layer(X)
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(30) if not torch.equal(layer(X), expected))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORK = """
import os, sys, torch
from pathlib import Path
from engine.execution.cpu.native.library import Level, Library, Team
from engine.execution.cpu.native.linear import Native, NativeLinear
library = Library(Path(sys.argv[1]))
team = Team(library, 3)
layer = NativeLinear(Native(library, Level.AVX2, team), torch.ones(100, 32), None)
assert layer(torch.ones(5, 32)).eq(32).all()
tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
child = os.fork()
assert layer(torch.ones(5, 32)).eq(32).all()  # on both sides
if child == 0:
    os._exit(0 if tasks() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_fork_finds_no_threads_and_both_sides_go_on() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORK, str(library_file())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_thread_enters_each_job_that_it_joins() -> None:
    """A job on tiles follows so soon on a job of another level that the team's threads do not sleep in between."""
    library = library_of(Level.AMX)
    team = Team(library, 2)
    plain = NativeLinear(Native(library, Level.AVX2, team), WEIGHT, None)
    tiles = NativeLinear(Native(library, Level.AMX, team), WEIGHT.bfloat16(), None)
    wide = X.repeat(30, 1)  # work enough for a thread that has to wake up first
    narrow = wide.bfloat16()
    expected = plain(wide), tiles(narrow)
    for _ in range(200):
        time.sleep(0.002)  # the threads fall asleep, and so have entered no job
        given = plain(wide), tiles(narrow)
        assert all(map(torch.equal, given, expected))
