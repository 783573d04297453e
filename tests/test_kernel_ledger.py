"""Compare compiled kernels with tests/kernel_ledger.json and docs/develop/kernels.md; see `kernel_ledger`."""

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
    summary_table,
)

RENEW = "run python tests/kernel_ledger.py"


def check(variant: Variant, arch: int, binary: Binary) -> None:
    version, ledger = read()
    where = f"{variant.kernel} {variant.digest}, sm_{arch}: {binary}"
    assert binary.shared <= SHARED_MEMORY[arch] * 1024 and not binary.spills, where
    if triton.__version__ == version:  # another compiler chooses otherwise
        recorded = ledger[variant.digest].binaries[arch]
        assert binary.is_close(recorded), f"{where}; recorded: {recorded}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_ledger_has_every_launch_and_no_other(arch: int) -> None:
    _, ledger = read()
    launched = {variant.digest for variant in record(arch)}
    assert launched == {digest for digest, entry in ledger.items() if arch in entry.binaries}, RENEW


@pytest.mark.slow
def test_the_page_shows_the_launches_and_the_ledger() -> None:
    text = PAGE.read_text()
    assert launch_table() in text and summary_table(read()[1]) in text, RENEW


def test_nothing_in_the_ledger_spills() -> None:
    _, ledger = read()
    binaries = [binary for entry in ledger.values() for binary in entry.binaries.values()]
    assert len(binaries) > 200 and not [binary for binary in binaries if binary.spills]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "model"), [(90, "8B"), (80, "8B int8")])
def test_attention_compiles_to_what_the_ledger_says(arch: int, model: str) -> None:
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


@pytest.mark.manual
@pytest.mark.timeout(1800)
def test_everything_compiles_to_what_the_ledger_says() -> None:
    _, binaries = measure()
    for (variant, arch), binary in binaries.items():
        check(variant, arch, binary)
