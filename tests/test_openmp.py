"""How OpenMP threads wait: the decision, its report, and that both come before torch is loaded."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support.tables import for_each

from engine import openmp
from engine.config import EngineConfig
from engine.machine.activity import wait_for_quiet
from engine.openmp import POLICY, choose_waiting

TORCH = EngineConfig(kernels="torch")
NATIVE = EngineConfig()


def never(_threads: int) -> float:
    raise AssertionError("measured although there is nothing to decide")


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(openmp, "is_built", lambda: True)
    monkeypatch.setattr(openmp, "cuda_devices", list)


@for_each(("config", "given", "share", "policy", "told"), [
    (TORCH, {}, 0.5, "passive", "passively.*50%"),  # the share of other processes
    (TORCH, {}, 0.97, None, "threads spin"),
    (NATIVE, {}, None, "passive", None),  # beside native kernels torch waits, and nothing is told
    *((config, {POLICY: chosen}, None, chosen, None) for config in (TORCH, NATIVE) for chosen in ("active", "passive")),
    (TORCH, {"OMP_NUM_THREADS": "1"}, None, None, None),  # one thread waits for no other
    (replace(TORCH, threads=1), {}, None, None, None),
    (replace(TORCH, device="cuda"), {}, None, None, None),
])  # fmt: skip
def test_threads_wait_passively_beside_busy_neighbours_unless_the_user_says_otherwise(
    config: EngineConfig, given: dict[str, str], share: float | None, policy: str | None, told: str | None
) -> None:
    """A share of None: it is not measured, because there is nothing to decide."""
    environment = {"OMP_NUM_THREADS": "2", **given}
    line = choose_waiting(config, environment, never if share is None else lambda _threads: share)
    assert environment.get(POLICY) == policy
    assert (line is None) == (told is None) and re.search(told or "", line or "")


def test_where_a_gpu_runs_steps_or_torch_is_loaded_nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "cuda_devices", lambda: ["0"])
    assert choose_waiting(replace(TORCH, device="auto"), {"OMP_NUM_THREADS": "2"}, never) is None
    assert choose_waiting(replace(TORCH, device="cpu"), {"OMP_NUM_THREADS": "2"}, lambda _: 0.9) is not None
    monkeypatch.setitem(sys.modules, "torch", object())
    assert choose_waiting(replace(TORCH, device="cpu"), {"OMP_NUM_THREADS": "2"}, never) is None


def test_native_kernels_are_expected_where_they_are_built_and_torch_runs_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert openmp.expects_native(NATIVE)
    for config in (TORCH, replace(NATIVE, overload="hidden"), replace(NATIVE, device="cuda")):
        assert not openmp.expects_native(config)
    assert "passively" in openmp.after_all(NATIVE, {POLICY: "passive"}), "should they fail their test"
    assert openmp.after_all(TORCH, {POLICY: "passive"}) == ""
    monkeypatch.setattr(openmp, "is_built", lambda: False)
    assert not openmp.expects_native(NATIVE)


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("4,2", 4)])
def test_as_many_threads_are_measured_as_a_step_uses(asked: str, threads: int) -> None:
    assert openmp.num_threads(TORCH, {"OMP_NUM_THREADS": asked}) == threads
    assert openmp.num_threads(TORCH, {"OMP_NUM_THREADS": ""}) >= 1
    assert openmp.num_threads(replace(TORCH, threads=5), {"OMP_NUM_THREADS": asked}) == 5


def test_the_share_of_busy_threads_is_a_share() -> None:
    assert 0.0 < openmp.processor_share(2, seconds=0.01) < 1.1


def test_a_start_waits_for_quiet_as_long_as_it_has_patience() -> None:
    shares, looks = iter((0.5, 0.6, 0.9, 0.95)), []

    def look(threads: int, seconds: float) -> float:
        looks.append((threads, seconds))
        return next(shares, 0.5)

    assert wait_for_quiet(2, look=look) and looks == [(2, 0.1)] * 3
    assert wait_for_quiet(2, look=look) and len(looks) == 4
    assert not wait_for_quiet(2, 0.5, look) and len(looks) == 9


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "told"), [(["--kernels", "torch"], True), ([], False)])
def test_the_library_reads_what_the_command_decides(flags: list[str], told: bool) -> None:
    """`tidemill profile` as a process: GNU OpenMP, which torch brings, shows its settings at its start."""
    program = (
        "import sys; from engine import openmp; openmp.processor_share = lambda threads: 0.3\n"
        "openmp.is_built = lambda: True\n"
        f"from tidemill import cli; sys.exit(cli.main(['profile', '/no/such/model', '--device', 'cpu', *{flags}]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    environment |= {"OMP_NUM_THREADS": "2", "OMP_DISPLAY_ENV": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ("OpenMP threads wait" in ended.stdout) == told
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in ended.stderr
