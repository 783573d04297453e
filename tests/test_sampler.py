"""The sampler against plain per-row references, and the independence of rows."""

import math

import numpy as np
import pytest
import torch

from engine.api import SamplingParams, TokenLogprobs
from engine.execution import sampler
from engine.execution.rows import SamplingTable, uniforms
from engine.execution.sampler import SampleInput, sample
from engine.scheduling.output import INVALID_TOKEN

VOCAB = 300


def run(
    logits: torch.Tensor, params: list[SamplingParams], tokens: list[list[int]] | None = None, num_prompt: int = 0
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sample every row once; row i of the table is deliberately not row i of the logits."""
    table = SamplingTable(len(params) + 3)
    rows = np.arange(len(params))[::-1].copy() + 2
    for row, each in zip(rows.tolist(), params, strict=True):
        table.write(row, each)
    known = [np.array(ids, dtype=np.int64) for ids in tokens or [[]] * len(params)]
    batch = SampleInput(rows, np.full(len(params), num_prompt), known)
    before = logits.clone()
    chosen, logprobs = sample(logits, table, batch)
    if logits.dtype == torch.bfloat16:
        torch.testing.assert_close(logits, before, equal_nan=True)
    return chosen.tolist(), logprobs


def params(**kwargs: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, **kwargs})  # type: ignore[arg-type]


GREEDY = params(temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_greedy_takes_the_lowest_of_the_largest(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(9, 5000).to(dtype)
    tied = logits.clone()
    tied[:, [4000, 17, 999]] = 30.0
    assert run(tied, [GREEDY] * 9)[0] == [17] * 9
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert run(logits, [GREEDY] * 9)[0] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("special", [GREEDY, params(seed=5), params(temperature=0.0, logit_bias=((3, 1.0),))], ids=str)
def test_a_row_that_is_not_finite_is_invalid_alone(bad: float, special: SamplingParams) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    reference = run(logits.clone(), [special] * 4)[0]
    logits[1, 200] = bad
    logits[3] = -math.inf
    tokens, _ = run(logits, [special] * 4)
    assert tokens == [reference[0], INVALID_TOKEN, reference[2], INVALID_TOKEN]


def test_a_nan_behind_a_mask_is_still_invalid() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = math.nan
    masked = params(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({7}))
    assert run(logits, [masked])[0] == [INVALID_TOKEN]


def test_masked_everywhere_is_invalid() -> None:
    everything = params(temperature=0.0, min_tokens=1, stop_token_ids=frozenset(range(VOCAB)))
    assert run(torch.zeros(1, VOCAB), [everything])[0] == [INVALID_TOKEN]


def test_some_logits_of_minus_infinity_are_fine() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 42] = -3.0
    assert run(logits, [GREEDY, params(seed=1)])[0] == [42, 42]


# --- draws -----------------------------------------------------------------------------------------------


def reference_support(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k, top-p, by sorting, in float64; ties are kept together."""
    scaled = logits.astype(np.float64) / p.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < p.min_p] = 0
    if 0 < p.top_k < len(weights):
        weights[weights < np.sort(weights)[-p.top_k]] = 0
    if p.top_p < 1:
        descending = np.sort(weights)[::-1]
        last = int(np.searchsorted(descending.cumsum(), p.top_p * weights.sum()))
        weights[weights < descending[min(last, len(weights) - 1)]] = 0
    return weights / weights.sum()


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.001},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
]


@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_tokens_are_the_inverse_cdf_of_the_filtered_distribution(spread: float) -> None:
    """Every row with another seed; token = first id whose cumulative probability exceeds the row's uniform number."""
    torch.manual_seed(3)
    wishes = [params(seed=seed, **filters) for seed, filters in enumerate(FILTERS * 12)]
    logits = torch.randn(len(wishes), VOCAB) * spread
    tokens, _ = run(logits.clone(), wishes, [[1, 2, 3]] * len(wishes), num_prompt=1)
    for row, (token, p) in enumerate(zip(tokens, wishes, strict=True)):
        cdf = reference_support(logits[row].numpy(), p).cumsum()
        u = float(uniforms(np.array([p.seed]), np.array([2]))[0])
        low = cdf[token - 1] if token else 0.0
        assert low - 1e-5 <= u < cdf[token] + 1e-5, (row, p)
        assert cdf[token] > low, "a token outside the filtered distribution"


def test_top_p_over_a_flat_distribution_needs_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", 2)
    monkeypatch.setattr(sampler, "_MORE_CANDIDATES", 2)
    torch.manual_seed(4)
    logits = torch.randn(40, VOCAB) * 0.1
    wishes = [params(seed=seed, top_p=p) for seed in range(10) for p in (0.1, 0.5, 0.9, 0.999999)]
    patched = run(logits.clone(), wishes)[0]
    monkeypatch.undo()
    assert run(logits.clone(), wishes)[0] == patched
    for row, p in enumerate(wishes):
        assert reference_support(logits[row].numpy(), p)[patched[row]] > 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-52])
def test_the_ends_of_the_unit_interval(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token outside the filtered distribution, however small or large the random number."""
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, positions: np.full(len(seeds), uniform))
    torch.manual_seed(9)
    logits = torch.randn(50, VOCAB)
    tokens, _ = run(logits.clone(), [params(top_k=2)] * 50)
    pairs = logits.topk(2).indices.sort().values
    assert tokens == pairs[:, 0 if uniform == 0 else 1].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.02])
def test_no_weight_is_subnormal(temperature: float) -> None:
    exponents = torch.arange(-110.7, 0.0, 0.7, dtype=torch.float64)
    logits = (exponents * temperature).float()[None]
    weights = sampler._weights(logits, torch.tensor([[temperature]]))[0]
    expected = (exponents - exponents[-1]).exp()
    kept = expected > math.exp(-80)
    torch.testing.assert_close(weights[kept].double(), expected[kept], rtol=1e-3, atol=0.0)
    assert (weights[~kept] == 0).all()
    assert kept.any() and not kept.all()


def test_tiny_temperatures_are_greedy_and_finite() -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, VOCAB) * 50
    wishes = [params(temperature=t, seed=9) for t in (1e-45, 1e-6, 1e-4)]
    assert run(logits.clone(), wishes)[0] == run(logits, [GREEDY] * 3)[0]


def test_neighbours_and_order_change_nothing() -> None:
    torch.manual_seed(6)
    filters = [*FILTERS, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3}, {"logit_bias": ((5, 9.0),)}]
    wishes = [params(seed=100 + i, logprobs=3, **f) for i, f in enumerate(filters)]
    logits = torch.randn(len(wishes), VOCAB)
    known = [[1, 5, 5, i] for i in range(len(wishes))]
    together = run(logits.clone(), wishes, known, num_prompt=1)
    for row, wish in enumerate(wishes):
        alone = run(logits[row : row + 1].clone(), [wish], [known[row]], num_prompt=1)
        assert alone == ([together[0][row]], [together[1][row]])  # type: ignore[index]
    order = np.random.default_rng(0).permutation(len(wishes))
    shuffled = run(logits[order], [wishes[i] for i in order], [known[i] for i in order], num_prompt=1)
    assert shuffled[0] == [together[0][i] for i in order]


# --- the random numbers ------------------------------------------------------------------------------------------


def splitmix(state: int) -> int:
    mask = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_uniforms_are_splitmix64(seed: int) -> None:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    stream = splitmix((seed + golden) & mask)
    for position in (0, 1, 1000):
        expected = (splitmix((stream + (position + 1) * golden) & mask) >> 12) / 2**52
        assert uniforms(np.array([seed]), np.array([position]))[0] == expected


# --- penalties, bias, minimum length -----------------------------------------------------------------------------


def reference_edits(logits: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    edited = logits.astype(np.float64).copy()
    for token, bias in p.logit_bias:
        edited[token] += bias
    if len(output) < p.min_tokens:
        edited[list(p.stop_token_ids)] = -math.inf
    for token in set(prompt + output):
        edited[token] = (
            edited[token] / p.repetition_penalty if edited[token] > 0 else edited[token] * p.repetition_penalty
        )
    for token in set(output):
        edited[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return edited


EDITS = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.4},
    {"logit_bias": ((3, 4.0), (8, -100.0), (9, 100.0))},
    {"min_tokens": 5, "stop_token_ids": frozenset({0, 1, 2, 3})},
    {"min_tokens": 4, "stop_token_ids": frozenset({0, 1, 2, 3})},
    {"min_tokens": 9},
    {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": ((1, 2.0),),
        "min_tokens": 6,
        "stop_token_ids": frozenset({4}),
    },
]


@pytest.mark.parametrize("edits", EDITS, ids=str)
def test_edits_equal_the_reference(edits: dict[str, object]) -> None:
    """Tokens 0-9 compete; the best of the edited logits must win, in every place of a mixed batch."""
    rng = np.random.default_rng(7)
    prompt = [0, 0, 1, 2]
    for _ in range(30):
        output = rng.integers(0, 6, 4).tolist()
        logits = rng.normal(size=(3, 10)).astype(np.float32)
        edited = params(temperature=0.0, **edits)
        tokens, _ = run(torch.from_numpy(logits.copy()), [GREEDY, edited, GREEDY], [prompt + output] * 3, num_prompt=4)
        assert tokens[0] == logits[0].argmax()
        assert tokens[2] == logits[2].argmax()
        assert tokens[1] == reference_edits(logits[1], edited, prompt, output).argmax()


# --- log-probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logprobs_are_of_the_raw_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    logits = (torch.randn(5, VOCAB) * 3).to(dtype)
    wishes = [
        params(temperature=0.0, logprobs=0),
        params(temperature=0.5, top_k=3, logprobs=2, seed=1),
        params(temperature=0.0, logprobs=20, logit_bias=((7, 100.0),)),
        params(temperature=0.0),
        params(temperature=0.0, logprobs=1),
    ]
    expected = logits.double().log_softmax(-1)
    logits_before = logits.clone()
    logits[4, 3] = math.nan
    tokens, logprobs = run(logits, wishes)
    assert logprobs is not None
    assert tokens[2] == 7
    assert logprobs[3] is None
    assert tokens[4] == INVALID_TOKEN
    assert logprobs[4] is None
    for row in range(3):
        got = logprobs[row]
        assert got is not None
        assert got.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-4)
        assert len(got.top) == wishes[row].logprobs
        assert [value for _, value in got.top] == sorted((value for _, value in got.top), reverse=True)
        best = expected[row].topk(20).values.tolist()
        for (token, value), bound in zip(got.top, best, strict=False):
            assert value == pytest.approx(expected[row, token].item(), abs=1e-4)
            assert value == pytest.approx(bound, abs=1e-4)
    assert run(logits_before[:1], [GREEDY])[1] is None


def test_more_alternatives_than_the_vocabulary() -> None:
    _, logprobs = run(torch.tensor([[1.0, 2.0, 3.0]]), [params(temperature=0.0, logprobs=20)])
    assert logprobs is not None and logprobs[0] is not None
    assert [token for token, _ in logprobs[0].top] == [2, 1, 0]
