"""Drafts without a model, against brute force: n-gram look-up, shared answers, learned acceptance and memory."""

import json
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from engine.api import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import ModelRunnerOutput
from engine.scheduling.speculation import Speculation
from engine.speculation import drafts
from engine.speculation.drafts import GRAMS, MAX_DRAFT, Acceptance, Drafts, DraftSource, NGrams, hash_tail
from engine.speculation.trace import DraftTrace, DraftTraces, TracedDrafts
from engine.virtual import Arrival, PredictedRunner, VirtualDriver
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.online import OnlineModel

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=150)
LINE = list(range(100, 140))
CONFIG = SchedulerConfig(num_units=2000, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=512)


def grow(index: NGrams, parts: list[tuple[list[int], int]]) -> None:
    """Append each part at once or later, and index some positions."""
    for tokens, most in parts:
        (index.extend if most % 2 else index.extend_later)(tokens)
        index.index(most)


def brute(tokens: list[int], indexed: int, tail: list[int]) -> tuple[int, int]:
    """The newest indexed position behind the longest n-gram that ends the tail."""
    for length in GRAMS:
        for position in range(indexed - 1, 7, -1):
            if tokens[position - length : position] == tail[8 - length :]:
                return position, length
    return 0, 0


@given(st.lists(st.tuples(TEXT, st.integers(0, 200)), min_size=1, max_size=4), st.integers(0, 60), st.integers(1, 20))
def test_a_look_up_finds_the_newest_of_the_longest_matches(
    parts: list[tuple[list[int], int]], by_hand: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "HOPS", 10**6)
        patch.setattr(drafts, "_BY_HAND", by_hand)
        index = NGrams()
        grow(index, parts)
        known, indexed = index.tokens.tolist(), len(index.tokens) - index.num_behind
        position, length = index.find(index.tail, hash_tail(index.tail), range(3))
    assert (position, length) == brute(known, indexed, known[-8:])
    if position:
        expected = list(known)
        for offset in range(most):  # a copy that overlaps itself, as in LZ77
            expected.append(expected[position + offset])
        assert list(index.continuation(position, most)) == expected[len(known) :]


def answer(proposer: Drafts, name: str, tokens: list[int], most: int = 8) -> tuple[int, int]:
    """Let a request produce `tokens`; return its steps and proposed tokens."""
    done = steps = proposed = 0
    while done < len(tokens):
        draft = proposer.propose(name, most)
        right = 0
        while right < min(len(draft.tokens), len(tokens) - done) and draft.tokens[right] == tokens[done + right]:
            right += 1
        if draft.tokens:
            proposer.judged(name, draft, right)
        proposed += len(draft.tokens)
        proposer.extend(name, tokens[done : done + right + 1])
        done += right + 1
        steps += 1
        while proposer.catch_up():
            pass
    return steps, proposed


def begin(proposer: Drafts, name: str, prompt: list[int], *owner: str) -> None:
    job, tenant, prefix = (*owner, "", "", "")[:3]
    proposer.start(name, prompt, job, tenant, prefix)
    while proposer.catch_up():
        pass


def noise(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 1_000_000) for _ in range(count)]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (("job", "a", "p"), ("job", "a", "q"), True),
        (("job", "a"), ("job", "b"), False),
        (("job", "a"), ("other", "a"), False),
        (("", "a", "p"), ("", "a", "p"), True),
        (("", "a", "p"), ("", "b", "p"), False),
        (("", "a", "p"), ("", "a", "q"), False),
        (("", "a", "p"), ("job", "a", "p"), False),
    ],
)
def test_answers_help_only_the_same_job_or_the_same_prefix_of_the_tenant(
    first: tuple[str, ...], second: tuple[str, ...], shared: bool
) -> None:
    proposer = Drafts()
    for number, owner in enumerate((first, first, second)):
        begin(proposer, str(number), [1, 2, 3, 4], *owner)
        steps, proposed = answer(proposer, str(number), LINE)
        proposer.finish(str(number), number != 1)
        assert (steps < 20) == (proposed > 0) == (number == 1 or (number == 2 and shared))


def test_an_answer_that_did_not_complete_helps_nothing() -> None:
    proposer = Drafts()
    for name in "ab":
        begin(proposer, name, [1, 2, 3, 4], "job")
        assert answer(proposer, name, LINE) == (len(LINE), 0)
        proposer.finish(name, False)
    proposer.finish("unknown", True)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), TEXT, st.booleans()), max_size=12))
def test_a_draft_is_a_continuation_within_its_own_sources(
    requests: list[tuple[int, int, list[int], bool]],
) -> None:
    """Each tenant and job has an alphabet of its own, and each draft must follow an occurrence in one of its texts."""
    proposer = Drafts()
    answers: list[tuple[tuple[int, int], list[int]]] = []
    for number, (tenant, job, text, completed) in enumerate(requests):
        own = [100 * tenant + 10 * job + token for token in text]
        half = len(own) // 2
        begin(proposer, str(number), own[:half], "job" if job else "", str(tenant))
        proposer.extend(str(number), own[half:])
        draft = proposer.propose(str(number), 5).tokens
        assert len(draft) <= 5 and {token - token % 10 for token in draft} <= {100 * tenant + 10 * job}
        texts = [*(old for owner, old in answers if owner == (tenant, job)), own + list(draft)]
        found = [each[p : p + len(draft)] == list(draft) for each in texts for p in range(1, len(each))]
        assert not draft or any(found[: -len(draft)])
        proposer.finish(str(number), completed)
        while proposer.catch_up(7):
            pass
        if completed:
            answers.append(((tenant, job), own))


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from(GRAMS), st.integers(1, MAX_DRAFT), st.integers(0, MAX_DRAFT)), max_size=80))
def test_survival_never_increases_with_the_position(outcomes: list[tuple[int, int, int]]) -> None:
    acceptance = Acceptance()
    for match, proposed, accepted in outcomes:
        acceptance[DraftSource("job", match)].learn(proposed, min(accepted, proposed))
    for match in GRAMS:
        survival = acceptance[DraftSource("job", match)].survival
        assert len(survival) == MAX_DRAFT and all(0 < p <= 1 for p in survival)
        assert list(survival) == sorted(survival, reverse=True)
        assert acceptance[DraftSource("job", match)].expected(5) == pytest.approx(sum(survival[:5]))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_acceptance_is_learned_by_position_and_follows_a_change(rate: float) -> None:
    rng, acceptance, source = random.Random(1), Acceptance(), DraftSource("context", 8)
    for now in (1.0 - rate, rate):
        for _ in range(400):
            right = next((i for i in range(4) if rng.random() > now), 4)
            acceptance[source].learn(4, right)
    for position, value in enumerate(acceptance[source].survival[:2]):
        assert value == pytest.approx(rate ** (position + 1), abs=0.12)


def test_a_chat_whose_drafts_fail_stops_proposing_and_starts_again() -> None:
    proposer = Drafts()
    begin(proposer, "r", [1, 2] * 20)
    deceptive = [token for i in range(500) for token in (1, 2, 1000 + i // 2)]
    _, proposed = answer(proposer, "r", deceptive, most=1)
    assert 5 < proposed < 100  # of about 500 chances
    steps, _ = answer(proposer, "r", noise(2, 200) * 2)
    assert steps < 200 + 60


def test_a_source_that_failed_gets_another_chance_while_its_drafts_are_not_tried() -> None:
    proposer, source = Drafts(), DraftSource("context", 8)
    begin(proposer, "r", [1, 2, 3] * 20)
    first = proposer.survival("r", source)[0]
    for _ in range(50):
        proposer.judged("r", drafts.Proposal((1, 2), source), 0)
    low = proposer.survival("r", source)[0]
    assert low < first / 4
    for _ in range(1000):
        proposer.extend("r", [1, 2, 3])
        proposer.catch_up()
        for _ in range(2):  # a step may ask twice
            proposer.propose("r", 3)
    assert first / 2 < proposer.survival("r", source)[0] < first


def unsteady(model: LatencyModel) -> OnlineModel:
    """Return a model whose steps of two tokens had a late one among ten, so that their margin is large."""
    online = OnlineModel(model)
    for step in range(200):
        features = BatchFeatures()
        features.add_decodes(1 + step % 2, 0)
        late = 0.2 if step % 20 == 1 else 0.0
        online.observe(features, model.predict(features) + late)
    return online


@pytest.mark.parametrize(("is_unsteady", "tbt"), [(False, 1.0), (False, 0.1), (False, 0.06), (True, 1.0)])
def test_a_draft_that_does_not_fit_into_the_step_is_shortened(is_unsteady: bool, tbt: float) -> None:
    """Steps that copy a text keep their limit, with the margin, and take a fraction of the steps of one token each."""
    model = LatencyModel(intercept=0.025, decodes=0.004)
    model = unsteady(model) if is_unsteady else model
    core = EngineCore(CONFIG, model=model, objective=StepObjective(1.0, tbt), speculation=Speculation())
    text = [*noise(4, 300), *noise(4, 301)[100:]]
    core.add_request(EngineRequest("r", tuple(text[:300]), SamplingParams(max_tokens=200)), 0.0)
    steps, now = 0, 0.0
    while (output := core.schedule(now)) is not None:
        core.state.speculation.catch_up()
        assert output.predicted_latency is not None and output.predicted_latency <= tbt
        now += output.predicted_latency
        tokens = [text[chunk.start + chunk.length] for chunk in output.chunks]
        core.update(output, ModelRunnerOutput(output.step_id, tokens, None, output.predicted_latency), now)
        steps += 1
    assert not core.has_requests and steps < 200 / 4


STEPS = LatencyModel(intercept=0.025, decodes=0.001)


def partly_copied(seed: int) -> list[int]:
    """A prompt of 200 tokens, and an answer of 120 that repeats parts of it between new tokens."""
    rng, prompt = random.Random(seed), noise(seed, 200)
    answer = list[int]()
    while len(answer) < 120:
        start = rng.randrange(180)
        answer += prompt[start : start + rng.randrange(5, 15)] + noise(rng.randrange(10**6), rng.randrange(12))
    return [*prompt, *answer[:120]]


def test_a_simulation_takes_the_steps_of_the_server_whose_drafts_were_recorded() -> None:
    core = EngineCore(CONFIG, model=STEPS, objective=StepObjective(1.0, 1.0), speculation=Speculation())
    live = 0
    for number in range(60):
        text = partly_copied(number)
        core.add_request(EngineRequest(str(number), tuple(text[:200]), SamplingParams(max_tokens=119)), 0.0)
        while (output := core.schedule(float(live))) is not None:
            core.state.speculation.catch_up()
            tokens = [text[chunk.start + chunk.length] for chunk in output.chunks]
            core.update(output, ModelRunnerOutput(output.step_id, tokens, None, 0.03), live + 0.03)
            live += 1
    recorded = json.dumps(core.state.speculation.traces.to_document())
    drafts_of = TracedDrafts(DraftTraces.from_document(json.loads(recorded)))
    virtual = EngineCore(
        CONFIG, model=STEPS, objective=StepObjective(1.0, 1.0), speculation=Speculation(drafts=drafts_of)
    )
    requests = [EngineRequest(str(n), tuple(range(200)), SamplingParams(max_tokens=119)) for n in range(60)]
    run = VirtualDriver(virtual, PredictedRunner(STEPS), [Arrival(100.0 * n, r) for n, r in enumerate(requests)]).run(
        1e9
    )
    assert [len(record.token_times) for record in run.online] == [119] * 60
    assert run.steps == pytest.approx(live, rel=0.05) and live < 0.7 * 119 * 60
    assert virtual.state.counters.accepted_tokens == pytest.approx(core.state.counters.accepted_tokens, rel=0.1)


@pytest.mark.parametrize(
    "damage",
    [{"looks": 1}, {"sources": [["page", 8, 1, []]]}, {"sources": [["job", 8, 1, [[2, 3, 1]]]]}, {"looks": "x"}],
)
def test_damaged_records_of_drafts_are_refused(damage: dict[str, object]) -> None:
    good = {"looks": 4, "sources": [["job", 8, 2, [[2, 1, 2.0]]]]}
    assert DraftTrace.from_document(good).per_decode == 0.5
    with pytest.raises(ValueError):
        DraftTrace.from_document(good | damage)


def kept_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = work()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept is not None
    return size


def test_a_prompt_of_100000_tokens_takes_under_5_megabytes() -> None:
    prompt = noise(3, 100_000)

    def work() -> Drafts:
        proposer = Drafts()
        begin(proposer, "r", prompt)
        return proposer

    assert kept_bytes(work) < 5_000_000


def test_finished_answers_are_forgotten_whole_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "GENERATION_TOKENS", 1024)
    texts = [noise(100 + number, 200) for number in range(120)]

    def work(most: int = 120) -> Drafts:
        proposer = Drafts()
        for number, text in enumerate(texts[:most]):
            for job in range(8):
                begin(proposer, "r", [5] * 10, f"{job}-{number // 40}")
                proposer.extend("r", text)
                proposer.finish("r", True)
        return proposer

    # a token takes 16 bytes, a slot 12; each corpus has two generations and no more than 32 corpora are kept
    assert kept_bytes(work) < drafts.MAX_CORPORA * 2 * (1100 * 16 + 256 * 12 + 4000) + 300_000
    proposer = work(40)
    for number in range(40):
        begin(proposer, "r", texts[number][:100], "0-0")
        draft = proposer.propose("r", 4).tokens
        assert draft == (() if number < 32 else tuple(texts[number][100:104]) if number > 35 else draft)
        proposer.finish("r", False)
