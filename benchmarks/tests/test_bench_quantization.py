"""What `python -m benchmarks quantization` holds eight bits against: each family's own distribution, with its scale,
caps and windows."""

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY_CASES, model_folder, reference_model

from benchmarks.live import make_model_folder
from benchmarks.quantization import DRAWN, GEMMA, Arm, divergences, logits_of
from engine.models.byte_cells import INTEGERS
from engine.models.checkpoint import load_weights
from engine.models.spec import load_spec

IDS = torch.randint(0, 97, (48,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", [*FAMILY_CASES, "gemma2-uncapped"])
def test_the_reference_is_the_model(case: str) -> None:
    """Beyond every window of the tiny models, against transformers."""
    folder = model_folder(case)
    spec = load_spec(folder)
    weights = load_weights(spec, folder, dtype="float32")
    with torch.inference_mode():
        expected = reference_model(case)(IDS[None]).logits[0]
    found = logits_of(spec, weights, IDS.tolist())
    assert (found - expected).abs().max() < 1e-4 * expected.std()
    narrow = logits_of(spec, weights, IDS.tolist(), INTEGERS)
    error = (narrow - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.1, "K and V are rounded, and little"


def test_a_table_has_a_gemma_with_windows_that_end_within_its_texts(tmp_path: Path) -> None:
    make_model_folder(tmp_path, GEMMA)
    spec = load_spec(tmp_path)
    assert set(spec.windows) == {GEMMA["sliding_window"], None} and GEMMA["sliding_window"] < DRAWN // 2
    assert spec.scale == pytest.approx(48**-0.5) and (spec.softcap, spec.logit_softcap) == (50.0, 30.0)


def test_no_divergence_from_oneself() -> None:
    spec = load_spec(folder := model_folder("gemma2"))
    exact, rounded = (load_weights(spec, folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    mean, largest, same, count = divergences(spec, exact, Arm(exact), [IDS.tolist()]).split()
    assert float(mean) == float(largest) == 0.0 and (same, count) == ("100.0%", "48")
    assert 0.0 < float(divergences(spec, exact, Arm(rounded), [IDS.tolist()]).split()[0]) < 0.05
