"""The benchmark of weights that stream, on a model that takes no time."""

from pathlib import Path

import pytest

from benchmarks import offload
from benchmarks.__main__ import BENCHES
from benchmarks.offload import Arm, Result, arms_for, compare, model_folder, report

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 1024,
}  # fmt: skip


async def test_every_arm_serves_all_tokens_and_streaming_ones_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PROFILE_SECONDS", 0.0)
    model = model_folder(tmp_path, 8, **TINY)
    arms = arms_for(6)
    results = await compare(model, tmp_path / "disk", arms, 0.6 * 2**20, 3, 2)
    assert [result.tokens for result in results] == [36, 36, 24]
    assert [result.floor > 0 for result in results] == [False, True, True]
    assert [arm.batch for arm in arms] == [6, 6, 4]


def test_the_table_says_what_share_of_the_limit_was_reached() -> None:
    arms = [Arm("in memory", False, 8, 8), Arm("streaming", True, 8, 8), Arm("streaming, fixed batches", True, 4, 4)]
    text = report(arms, [Result(100, 1.0, 0.0), Result(80, 2.0, 0.16), Result(20, 1.0, 0.16)])
    assert text.split("\n")[2].split() == ["streaming", "8", "40.0", "160", "50.0", "0.80"]
    assert text.endswith("streaming gives 2.0 x the tokens/s of fixed batches")


async def test_a_model_that_fits_is_no_measurement(tmp_path: Path) -> None:
    model = model_folder(tmp_path, 4, **TINY)
    with pytest.raises(SystemExit, match="fits"):
        await compare(model, tmp_path / "disk", arms_for(2)[1:], 2**30, 3, 1)


def test_it_can_be_asked_for() -> None:
    assert BENCHES["offload"] == offload.__name__
