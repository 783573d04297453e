"""Kernels compile to what docs/develop/kernels.md says; see `kernel_ledger`."""

import pytest

triton = pytest.importorskip("triton")

from kernel_ledger import (  # noqa: E402
    ARCHS,
    PAGE,
    SHARED_MEMORY,
    Binary,
    Variant,
    compile_variant,
    launch_table,
    measure,
    read,
    record,
)

RENEW = "python tests/kernel_ledger.py writes the page anew"


def check(variant: Variant, arch: int, binary: Binary) -> None:
    version, ledger = read()
    where = f"{variant.kernel} {variant.digest}, sm_{arch}: {binary}"
    assert binary.shared <= SHARED_MEMORY[arch] * 1024 and not binary.spills, where
    if triton.__version__ == version:  # another compiler chooses otherwise
        assert binary.is_close(ledger[variant.digest, arch]), f"{where}; the page: {ledger[variant.digest, arch]}"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_page_has_every_launch_and_no_other(arch: int) -> None:
    _, ledger = read()
    launched = {variant.digest for variant in record(arch)}
    assert launched == {digest for digest, each in ledger if each == arch}, RENEW


def test_the_page_says_what_steps_launch() -> None:
    assert launch_table() in PAGE.read_text(), RENEW


def test_nothing_on_the_page_spills() -> None:
    _, ledger = read()
    assert len(ledger) > 200 and not [key for key, binary in ledger.items() if binary.spills]


@pytest.mark.parametrize(("arch", "model"), [(90, "8B"), (80, "8B int8")])
def test_attention_compiles_to_what_the_page_says(arch: int, model: str) -> None:
    found = [
        each for each in record(arch, [model]) if each.kernel in ("split_kernel", "prefill_kernel", "merge_kernel")
    ]
    assert len(found) == 3
    for variant in found:
        check(variant, arch, compile_variant(variant, arch))


def test_a_change_of_more_than_a_tenth_is_seen() -> None:
    base = Binary(100, 0, 65_536, 2_000, 400)
    assert base.is_close(Binary(108, 0, 65_536, 1_900, 420))
    for changed in (base._replace(stack=8), base._replace(registers=120), base._replace(shared=98_304)):
        assert not base.is_close(changed)
    assert not base.is_close(base._replace(loop=500)) and not base.is_close(base._replace(instructions=2_400))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_compiles_to_what_the_page_says() -> None:
    _, binaries = measure()
    for (variant, arch), binary in binaries.items():
        check(variant, arch, binary)
