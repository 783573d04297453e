"""How OpenMP threads wait: what is decided, what is told, and that it is decided before torch is loaded."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from engine import openmp
from engine.openmp import POLICY, choose_waiting


def never(_threads: int) -> float:
    raise AssertionError("measured although there is nothing to decide")


def share(value: float) -> Callable[[int], float]:
    return lambda _threads: value


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_beside_busy_neighbours_threads_wait_passively() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    line = choose_waiting("auto", environment, share(0.5))
    assert environment[POLICY] == "passive"
    assert line is not None and "passively" in line and "50%" in line  # what others take


def test_on_a_quiet_machine_they_spin() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    line = choose_waiting("cpu", environment, share(0.97))
    assert POLICY not in environment
    assert line is not None and "spinning" in line


@pytest.mark.parametrize("policy", ["active", "passive"])
def test_the_users_choice_wins(policy: str) -> None:
    environment = {"OMP_NUM_THREADS": "2", POLICY: policy}
    assert choose_waiting("cpu", environment, never) is None
    assert environment[POLICY] == policy


def test_one_thread_waits_for_nobody() -> None:
    assert choose_waiting("cpu", {"OMP_NUM_THREADS": "1"}, never) is None


def test_on_a_gpu_nothing_is_decided() -> None:
    assert choose_waiting("cuda", {"OMP_NUM_THREADS": "2"}, never) is None


def test_once_torch_is_loaded_nothing_can_be_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    assert choose_waiting("cpu", {"OMP_NUM_THREADS": "2"}, never) is None


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("4,2", 4)])
def test_as_many_threads_are_measured_as_a_step_uses(asked: str, threads: int) -> None:
    assert openmp.num_threads({"OMP_NUM_THREADS": asked}) == threads
    assert openmp.num_threads({"OMP_NUM_THREADS": ""}) >= 1


def test_the_share_of_busy_threads_is_a_share() -> None:
    assert 0.0 < openmp.processor_share(2, seconds=0.01) < 1.1


def test_the_library_reads_what_the_command_decides() -> None:
    """`tidemill profile` as a process: GNU OpenMP, which torch brings, shows at its start what it was told."""
    program = (
        "import sys; from engine import openmp; openmp.processor_share = lambda threads: 0.3\n"
        "from gateway import cli; sys.exit(cli.main(['profile', '/no/such/model', '--device', 'cpu']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    environment |= {"OMP_NUM_THREADS": "2", "OMP_DISPLAY_ENV": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "passively" in ended.stdout
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in ended.stderr
