"""Fit the latency model by non-negative least squares of the relative error (HyGen §4.2, "Model Training").

Schedulers need small relative errors, so every sample is divided by its measured time. A second pass weights each
sample by 1 ÷ |residual|, which minimises absolute instead of squared errors (MAPE) and limits the leverage of outliers.
The Gram matrix is accumulated block by block, so 80,000 samples cost a few passes over their rows. Hinges are
accumulated as increments between knots, which are nearly orthogonal; hinges would square a condition number that is
already large. numpy and scipy are imported on the first fit only.

`refit` fits anew on executed steps, and checks whether the result is better. A sweep covers an idle machine and its own
choice of steps. A scale corrects a device that is slower as a whole, but not one whose decodes alone became slower. The
refit uses recent steps in regimes that have enough. Other regimes use the sweep, scaled by the ratio of the nearest
recent regime. Errors are measured on held-out steps, weighted by time and averaged over regimes, because budgets are
sums of step times. A fit is pure and too slow for a server's event loop.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from predictor.features import EVERYTHING, SUMS, BatchFeatures, Reach
from predictor.model import (
    CACHE_TERMS,
    COLUMNS,
    FITTED_TERMS,
    ROW_WIDTH,
    LatencyModel,
    Sample,
    SampleLog,
    default_knots,
    split_samples,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

BLOCK_ROWS = 8192
SINGLE_THREAD_PRODUCT = 220_000
"""Multiply-adds below which BLAS stays on the calling thread. Fits run while the server is busy. BLAS threads that wait
for each other on occupied cores made the same product a hundred times slower than a single thread."""
RESIDUAL_FLOOR = 0.002
"""Relative residuals below this get equal weight; otherwise the second pass would favour the best-fitted samples."""


def fit(
    samples: Iterable[Sample] | SampleLog,
    *,
    token_limit: int = 8192,
    buckets: tuple[int, ...] = (),
    decode_buckets: tuple[int, ...] = (),
    jump_at: int = 0,
    reach: Reach = EVERYTHING,
) -> LatencyModel:
    """Fit the model with the least mean relative error over `samples`.

    Args:
        samples: Measured steps; a `SampleLog` is used in place.
        token_limit: Largest step in tokens.
        buckets: Token counts to which steps are padded.
        decode_buckets: Token counts to which steps without prompts are padded.
        jump_at: Padded token count beyond which every step may take longer by the same time; 0: none.
        reach: Windows with which the features count contexts.

    Raises:
        ValueError: Without samples, or for times that are not positive.
    """
    import numpy as np

    log = samples if isinstance(samples, SampleLog) else SampleLog(samples)
    rows = np.frombuffer(log.values, dtype=np.float64).reshape(-1, ROW_WIDTH)
    if not len(rows):
        raise ValueError("a fit needs at least one sample")
    seconds = rows[:, -1]
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError("measured times must be positive and finite")
    knots = default_knots(token_limit)
    design = _Design(knots, buckets, decode_buckets, jump_at)
    weights = 1.0 / seconds
    coefficients = _solve(*design.gram(rows, weights), len(knots))
    residuals = np.abs(design.evaluate(rows, coefficients) / seconds - 1.0)
    sharper = weights / np.sqrt(np.maximum(residuals, RESIDUAL_FLOOR))
    coefficients = _solve(*design.gram(rows, sharper), len(knots))
    linear = dict(zip(FITTED_TERMS, map(float, coefficients), strict=False))
    hinges = tuple(map(float, coefficients[len(FITTED_TERMS) :]))
    return LatencyModel(
        **linear,
        knots=knots,
        hinges=hinges,
        token_limit=token_limit,
        buckets=buckets,
        decode_buckets=decode_buckets,
        jump_at=jump_at,
        reach=reach,
    )


class _Design:
    """Design matrix, built block by block: linear terms, then increments between knots."""

    def __init__(
        self, knots: tuple[int, ...], buckets: tuple[int, ...], decode_buckets: tuple[int, ...] = (), jump_at: int = 0
    ) -> None:
        import numpy as np

        self._np: Any = np
        self._knots = np.array(knots, dtype=np.float64)
        self._widths = np.diff(self._knots, append=np.inf)
        self._buckets = np.array(buckets, dtype=np.float64)
        self._decode_buckets = np.array(decode_buckets or buckets, dtype=np.float64)
        self._jump_at = jump_at or math.inf
        self._fields = [SUMS.index(column) for column in COLUMNS.values()]

    def _block(self, rows: "Matrix") -> "Matrix":
        """Return the columns of a block, [n, ROW_WIDTH] → [columns, n]."""
        np = self._np
        out: Matrix = np.empty((len(FITTED_TERMS) + len(self._knots), len(rows)))
        out[0] = 1.0
        padded = self._pad(rows)
        out[1 : len(FITTED_TERMS) - 1] = rows[:, self._fields].T
        out[len(FITTED_TERMS) - 1] = padded > self._jump_at
        increments = out[len(FITTED_TERMS) :]
        np.subtract(padded, self._knots[:, None], out=increments)
        np.clip(increments, 0.0, self._widths[:, None], out=increments)
        return out

    def _pad(self, rows: "Matrix") -> "Matrix":
        tokens = rows[:, SUMS.index("num_tokens")]
        prompts = rows[:, SUMS.index("num_prefill_chunks")] > 0
        padded: Matrix = self._np.where(
            prompts, self._padded(tokens, self._buckets), self._padded(tokens, self._decode_buckets)
        )
        return padded

    def _padded(self, tokens: "Matrix", buckets: "Matrix") -> "Matrix":
        if not len(buckets):
            return tokens
        np = self._np
        edges = np.append(buckets, np.inf)[np.searchsorted(buckets, tokens)]
        padded: Matrix = np.where(np.isinf(edges), tokens, edges)
        return padded

    def gram(self, rows: "Matrix", weights: "Matrix") -> tuple["Matrix", "Matrix"]:
        """Return (AᵀA, Aᵀb) of the rows scaled by `weights`; b is the measured seconds."""
        np = self._np
        width = len(FITTED_TERMS) + len(self._knots)
        total: Matrix = np.zeros((width + 1, width))
        step = max(64, SINGLE_THREAD_PRODUCT // (width * (width + 1)))
        for at in range(0, len(rows), BLOCK_ROWS):
            part = rows[at : at + BLOCK_ROWS]
            block = np.vstack((self._block(part), part[:, -1]))
            block *= weights[at : at + BLOCK_ROWS]
            for begin in range(0, len(part), step):
                piece = block[:, begin : begin + step]
                total += piece @ piece[:-1].T
        return total[:-1], total[-1]

    def evaluate(self, rows: "Matrix", coefficients: "Matrix") -> "Matrix":
        """Return the predicted seconds of every row; cumulative sums turn hinge coefficients into slopes."""
        np = self._np
        slopes = coefficients.copy()
        slopes[len(FITTED_TERMS) :] = np.cumsum(coefficients[len(FITTED_TERMS) :])
        blocks = range(0, len(rows), BLOCK_ROWS)
        parts = [np.einsum("i,ij->j", slopes, self._block(rows[at : at + BLOCK_ROWS])) for at in blocks]
        predicted: Matrix = np.concatenate(parts)
        return predicted


def _solve(gram: "Matrix", target: "Matrix", num_knots: int) -> "Matrix":
    """Solve non-negative least squares; the last `num_knots` coefficients are those of hinges instead of increments.

    With the pivoted Cholesky factor PᵀGP = UᵀU the problem is min |U Pᵀx − U⁻ᵀPᵀg|. Directions without data lie beyond
    the rank and drop out, so features that never occur, or always occur together, are harmless.
    """
    import numpy as np
    from scipy.linalg import solve_triangular
    from scipy.linalg.lapack import dpstrf
    from scipy.optimize import nnls

    scale = np.sqrt(np.diag(gram))
    scale[scale == 0.0] = 1.0
    factor, pivots, rank, _ = dpstrf(gram / np.outer(scale, scale), tol=len(gram) * 1e-15)
    order = pivots - 1
    upper = np.triu(factor)[:rank]
    right = solve_triangular(upper[:, :rank], (target / scale)[order][:rank], trans="T")
    matrix = np.empty_like(upper)
    matrix[:, order] = upper
    matrix *= scale
    # A hinge is the sum of all increments from its knot on.
    matrix[:, -num_knots:] = np.cumsum(matrix[:, -num_knots:][:, ::-1], axis=1)[:, ::-1]
    norms = np.linalg.norm(matrix, axis=0)
    used = norms > 1e-9 * scale
    solution = np.zeros(len(norms))
    solution[used] = nnls(matrix[:, used] / norms[used], right, maxiter=50 * len(norms))[0] / norms[used]
    return solution


FEWEST = 100
"""Minimum number of recent steps for a refit."""
COVERED = 16
"""Number of recent steps of a regime that replace those of the sweep."""
HELD_OUT = 0.25
BETTER = 0.95
"""Required ratio of new to old error; a smaller improvement may be chance."""
SLOW = 1.5
"""Ratio to the sweep above which the device counts as shared or throttled, a temporary state."""

Regime = tuple[bool, int]
"""(has prompts, bit length of the number of tokens) of a step."""


@dataclass(frozen=True, slots=True)
class Refit:
    """Result of a refit.

    Attributes:
        model: The new model.
        error: Error of `model` on held-out steps.
        error_before: Error of the old model on the same steps, scaled to the training steps.
        level: Measured time of recent steps ÷ prediction by the sweep, or by the old model without a sweep.
    """

    model: LatencyModel
    error: float
    error_before: float
    level: float

    @property
    def better(self) -> bool:
        return self.error < BETTER * self.error_before

    @property
    def is_of_slow_device(self) -> bool:
        """Whether the fit reflects a temporary slowdown and must not be saved: later starts compare with profiles."""
        return self.level >= SLOW


def refit(current: LatencyModel, sweep: Sequence[Sample], recent: Iterable[Sample]) -> Refit | None:
    """Fit a new model; None with too few steps. Coefficients of cache work are kept and steps with it are excluded."""
    steps = [sample for sample in recent if not _has_cache_work(sample.features)]
    if len(steps) < FEWEST:
        return None
    train, held_out = split_samples(steps, HELD_OUT)
    limits = {name: getattr(current, name) for name in ("token_limit", "buckets", "decode_buckets", "jump_at", "reach")}
    base = fit(sweep, **limits) if sweep else current
    aged = _aged(sweep, train, base)
    found = fit([*train, *aged], **limits)
    model = replace(found, **{name: getattr(current, name) for name in CACHE_TERMS})
    took = sum(s for _, s in train)
    scale, level = (took / sum(each.predict(f) for f, _ in train) for each in (current, base))
    return Refit(model, error_of(model, held_out), error_of(current.scaled(scale), held_out), level)


def error_of(model: LatencyModel, samples: Sequence[Sample]) -> float:
    """Return Σ |predicted − measured| ÷ Σ measured per regime, averaged over the regimes."""
    sums: dict[Regime, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for features, seconds in samples:
        off_and_all = sums[_regime(features)]
        off_and_all[0] += abs(model.predict(features) - seconds)
        off_and_all[1] += seconds
    return math.fsum(off / total for off, total in sums.values()) / len(sums)


def _aged(sweep: Sequence[Sample], train: Sequence[Sample], base: LatencyModel) -> list[Sample]:
    """Return the sweep's samples of regimes without enough recent steps, scaled by the ratio of measured time to the
    prediction of `base` (the fit of the sweep) in the nearest regime."""
    sums: dict[Regime, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for features, seconds in train:
        took = sums[_regime(features)]
        took[0] += seconds
        took[1] += base.predict(features)
        took[2] += 1
    ratios = {regime: took / predicted for regime, (took, predicted, count) in sums.items() if count >= COVERED}
    if not ratios:
        return list(sweep)

    def distance(left: Regime, right: Regime) -> tuple[bool, int]:
        return left[0] is not right[0], abs(left[1] - right[1])

    found = []
    for features, seconds in sweep:
        regime = _regime(features)
        if regime not in ratios:
            found.append(Sample(features, seconds * ratios[min(ratios, key=lambda r: (distance(regime, r), r))]))
    return found


def _regime(features: BatchFeatures) -> Regime:
    return features.num_prefill_chunks > 0, features.num_tokens.bit_length()


def _has_cache_work(features: BatchFeatures) -> bool:
    return bool(features.compact_tokens or features.restored_tokens or features.transferred_bytes)
