"""Fit the latency model by non-negative least squares of the relative error (HyGen §4.2, "Model Training").

Schedulers need small relative errors, so every sample is divided by its measured time. A second pass weights each
sample by 1 ÷ |residual|, which minimises absolute instead of squared errors (MAPE) and limits the leverage of outliers.
The Gram matrix is accumulated block by block, so 80,000 samples cost a few passes over their rows. Hinges are
accumulated as increments between knots, which are nearly orthogonal; hinges would square a condition number that is
already large. numpy and scipy are imported on the first fit only.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from predictor.features import FeatureRow
from predictor.model import COLUMNS, FITTED_TERMS, LatencyModel, default_knots
from predictor.reach import EVERYTHING, Reach
from predictor.samples import ROW_WIDTH, Sample, SampleLog

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
    reach: Reach = EVERYTHING,
) -> LatencyModel:
    """Fit the model with the least mean relative error over `samples`.

    Args:
        samples: Measured steps; a `SampleLog` is used in place.
        token_limit: Largest step in tokens.
        buckets: Token counts to which steps are padded.
        decode_buckets: Token counts to which steps without prompts are padded.
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
    design = _Design(knots, buckets, decode_buckets)
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
        reach=reach,
    )


class _Design:
    """Design matrix, built block by block: linear terms, then increments between knots."""

    def __init__(self, knots: tuple[int, ...], buckets: tuple[int, ...], decode_buckets: tuple[int, ...] = ()) -> None:
        import numpy as np

        self._np: Any = np
        self._knots = np.array(knots, dtype=np.float64)
        self._widths = np.diff(self._knots, append=np.inf)
        self._buckets = np.array(buckets, dtype=np.float64)
        self._decode_buckets = np.array(decode_buckets or buckets, dtype=np.float64)
        self._fields = [FeatureRow._fields.index(column) for column in COLUMNS.values()]

    def _block(self, rows: "Matrix") -> "Matrix":
        """Return the columns of a block, [n, ROW_WIDTH] → [columns, n]."""
        np = self._np
        out: Matrix = np.empty((len(FITTED_TERMS) + len(self._knots), len(rows)))
        out[0] = 1.0
        out[1 : len(FITTED_TERMS)] = rows[:, self._fields].T
        increments = out[len(FITTED_TERMS) :]
        np.subtract(self._pad(rows), self._knots[:, None], out=increments)
        np.clip(increments, 0.0, self._widths[:, None], out=increments)
        return out

    def _pad(self, rows: "Matrix") -> "Matrix":
        tokens = rows[:, FeatureRow._fields.index("num_tokens")]
        prompts = rows[:, FeatureRow._fields.index("num_prefill_chunks")] > 0
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
