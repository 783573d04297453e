"""The check of kernels at start: wrong and raising kernels are found, named, and replaced."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import model_folder

from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernel_check import FAULT_SECONDS, KernelFaults, check_kernels, remembered
from engine.limits import Limits
from engine.models.checkpoint import load_weights
from engine.models.spec import ModelSpec, load_spec
from engine.triton_kernels import Kernels, twins

LIMITS = Limits(16, 64, 2048, 0, 16)


def faulty(name: str, change: Callable[..., Any]) -> Kernels:
    """Return the twins with `change(function, *args, **options)` in place of one."""
    kernels: Any = ModuleType("faulty")
    for each in twins.__all__:
        setattr(kernels, each, getattr(twins, each))
    right = getattr(twins, name)
    setattr(kernels, name, lambda *args, **options: change(right, *args, **options))
    return kernels  # type: ignore[no-any-return]


def check(kernels: Kernels, family: str = "qwen3", limits: Limits = LIMITS, **options: Any) -> KernelFaults:
    spec = load_spec(folder := model_folder(family))
    if family == "opt":  # learned positions
        limits = replace(limits, max_model_len=spec.max_context)
    weights = load_weights(spec, folder)

    def make(small: ModelSpec, few: Limits, given: Kernels, graphs: bool) -> CudaDevice:
        device = CudaDevice(small, weights, given, few, graphs=graphs, host_units=2, **options)
        device.warm_up()
        return device

    return check_kernels(spec, limits, kernels, make, graphs=False)


@pytest.mark.slow
def test_right_kernels_have_no_fault() -> None:
    for family in ("qwen3", "neox", "opt"):
        assert check(twins, family) == KernelFaults()
    assert check(twins, limits=Limits(1, 16, 64, 0, 16)) == KernelFaults()


ALL: dict[str, Any] = {"family": "llama-mha-tied", "scratch_blocks": 2, "adapted": True}


def test_right_kernels_of_adapters_and_hidden_state_have_no_fault() -> None:
    assert check(twins, **ALL) == check(twins, limits=Limits(1, 16, 64, 0, 16), **ALL) == KernelFaults()


@pytest.mark.parametrize("name", ["hidden_gather", "lora_add", "unit_copy"])
def test_kernels_that_do_nothing_are_named(name: str) -> None:
    """Of an engine with adapters, a host tier and hidden state; padding alone would not show it."""
    faults = check(faulty(name, lambda *_args, **_options: None), **ALL)
    assert faults.kernels[name].startswith("differs")


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of resource: shared memory\nRequired: 262144")


def first_changed(right: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Change one value of a kernel's result, or else of its output buffers."""
    result = right(*args, **options)
    target = result[0] if isinstance(result, tuple) else result
    if target is None:
        target = options["out"] if "out" in options else args[4]
    target.view(-1)[0] += 1 if not target.is_floating_point() else target.abs().max() + 1
    return result


def wrong_when_repeated(right: Callable[..., Any], control: Any, *args: Any) -> None:
    """Return to the first step."""
    control[0] = 0
    right(control, *args)


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("add_rms_norm", raises, "raised RuntimeError: out of res"),
        ("begin_step", wrong_when_repeated, "differs"),
        ("decode_attention", first_changed, "differs"),
    ],
)
def test_a_wrong_or_raising_kernel_is_named(name: str, fault: Callable[..., Any], said: str) -> None:
    faults = check(faulty(name, fault))
    assert list(faults.kernels) == [name] and faults.kernels[name].startswith(said)
    assert faults.lines[0].startswith(f"the kernel {name} {said}") and "\n" not in faults.lines[0]
    assert bool(faults.graphs) is (name in twins.WAITING)


def last_split_lost(right: Callable[..., Any], q: Any, pool: Any, work: Any, *args: Any, **options: Any) -> None:
    """Attend to all but the last 30 tokens."""
    before = work.requests[:, 1].clone()
    work.requests[:, 1] = (before - 30).clamp(min=0)
    right(q, pool, work, *args, **options)
    work.requests[:, 1] = before


def test_small_values_are_compared_with_their_own_size() -> None:
    """The average of hundreds of random values is small; so is the error if some are left out."""
    assert check(faulty("decode_attention", last_split_lost)).kernels.keys() == {"decode_attention"}


@pytest.mark.slow
def test_graphs_that_differ_or_fail_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(folder := model_folder("qwen3"))
    weights = load_weights(spec, folder)

    def check_graphs(graph: Callable[[CudaDevice], None]) -> str:
        def make(small: ModelSpec, few: Limits, kernels: Kernels, graphs: bool) -> CudaDevice:
            device = CudaDevice(small, weights, kernels, few, graphs=False)
            if graphs:
                graph(device)
            return device

        return check_kernels(spec, LIMITS, twins, make, graphs=True).graphs

    def wrong(device: CudaDevice) -> None:
        forward = device.forward
        monkeypatch.setattr(device, "forward", lambda *args: (forward(*args)[0] * 1.01, None))

    monkeypatch.setattr(CudaDevice, "num_graphs", CudaDevice.num_shapes)
    assert check_graphs(lambda _device: None) == ""
    assert "a replay differs from an eager step by" in check_graphs(wrong)
    assert "a capture raised RuntimeError: no" in check_graphs(lambda _device: raises_no())
    monkeypatch.setattr(CudaDevice, "num_graphs", 1)
    assert "captures failed" in check_graphs(lambda _device: None)


def raises_no() -> None:
    raise RuntimeError("no")


def test_the_result_is_stored_by_what_was_checked(tmp_path: Path) -> None:
    found, calls, lines = KernelFaults({"draw": "raised"}, "no"), [], list[str]()

    def ask(key: int, result: KernelFaults = found) -> KernelFaults:
        def work() -> KernelFaults:
            calls.append(key)
            return result

        return remembered(tmp_path, (key,), work, lines.append)

    assert [ask(key) for key in (1, 1, 2)] == [found] * 3 and calls == [1, 2]
    assert "checking the kernels" in lines[0] and "0.0 hours ago; remove " in lines[1] and len(lines) == 3
    first = Path(lines[1].partition("remove ")[2].partition(" to check")[0])
    first.write_text("{")
    assert ask(1) == ask(2) == found and calls == [1, 2, 1]
    for path, old in (((tmp_path / "kernels" / each.name), 2 * FAULT_SECONDS) for each in first.parent.iterdir()):
        os.utime(path, (time.time() - old,) * 2)
    assert ask(1, KernelFaults()) == KernelFaults() and calls[3:] == [1], "a fault of yesterday is checked again"
    os.utime(first, (1.0, 1.0))
    assert ask(1) == KernelFaults() and calls[4:] == [], "a kernel that has passed is not"
