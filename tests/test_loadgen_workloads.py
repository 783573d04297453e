"""Prompts of an exact number of tokens, calibration without a tokenizer, and the named workloads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import InputError, ServerError, lengths, workloads
from loadgen.arrivals import parse_curve
from loadgen.plan import ANCHOR, WORDS, Plan, PromptMaker, Target, TokenIds, WordCosts
from loadgen.runner import word_costs
from loadgen.traces import Content
from loadgen.workloads import WORKLOADS, Options, build, clipped, fixed

COSTS = WordCosts(("a", "b", "c", "d"), (1, 1, 1, 2), overhead=7)


def cost_of(text: str, costs: WordCosts = COSTS) -> int:
    return costs.overhead + sum(costs.costs[costs.words.index(word)] for word in text.removeprefix(ANCHOR).split())


@given(
    st.integers(0, 1 << 25),
    st.integers(1, 700),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), max_size=4),
)
def test_token_id_prompts_are_exact_and_share_their_prefixes(index, tokens, segments) -> None:
    maker = PromptMaker(TokenIds(16, 250), "completions", seed=1, salt=2)
    content = Content(segments=tuple(segments))
    prompt = maker.fields(index, tokens, content)["prompt"]
    assert len(prompt) == tokens and all(16 <= token < 250 for token in prompt)
    other = maker.fields(index + 1, tokens + 900, content)["prompt"]
    shared = min(tokens, sum(size for _, size in segments))
    assert prompt[:shared] == other[:shared]


@given(
    st.integers(0, 1000), st.integers(8, 400), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=3)
)
def test_text_prompts_are_exact_by_the_calibrated_costs(index, tokens, segments) -> None:
    maker = PromptMaker(COSTS, "chat", seed=1, salt=2)
    messages = maker.fields(index, tokens, Content(segments=tuple(segments)))["messages"]
    assert cost_of(messages[0]["content"]) == tokens


@given(st.integers(1, 200))
def test_words_of_two_and_three_tokens_still_add_up(count: int) -> None:
    costs = WordCosts(("x", "y"), (2, 3))
    got = cost_of(costs.draw(count, np.random.default_rng(0)), costs)
    assert got == (count if count > 1 else 0)


def test_a_segment_begins_alike_whatever_its_length() -> None:
    maker = PromptMaker(TokenIds(), "completions", seed=0, salt=0)
    long = maker.fields(0, 300, Content(segments=((5, 300),)))["prompt"]
    assert maker.fields(9, 100, Content(segments=((5, 100),)))["prompt"] == long[:100]
    big = maker.fields(1, 30, Content(segments=(((5 + (1 << 32)), 30),)))["prompt"]
    assert big != long[:30]


def test_seed_salt_and_request_each_change_the_text() -> None:
    made = {
        (seed, salt, index): tuple(
            PromptMaker(TokenIds(), "completions", seed, salt).fields(index, 40, Content())["prompt"]
        )
        for seed in (0, 1)
        for salt in (0, 1)
        for index in (0, 1)
    }
    assert len(set(made.values())) == 8
    again = PromptMaker(TokenIds(), "completions", 1, 0).fields(1, 40, Content())["prompt"]
    assert tuple(again) == made[1, 0, 1]


def test_given_text_and_messages_are_sent_as_they_are() -> None:
    chat, plain = PromptMaker(COSTS, "chat", 0, 0), PromptMaker(COSTS, "completions", 0, 0)
    talk = Content(messages=(("system", "s"), ("user", "u")))
    assert chat.fields(0, 5, talk)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert plain.fields(0, 5, talk) == {"prompt": "s\nu"}
    assert chat.fields(0, 5, Content(text="t"))["messages"] == [{"role": "user", "content": "t"}]
    with pytest.raises(InputError, match="text"):
        PromptMaker(TokenIds(), "chat", 0, 0)


async def test_calibration_finds_overhead_and_odd_words_in_few_probes() -> None:
    odd = {"world": 2, "story": 3}
    probes = []

    async def probe(text: str) -> int:
        probes.append(text)
        # The first word has no space before it and costs otherwise, as behind a template that strips.
        return 9 + 2 * len(text.split()[:1]) + sum(odd.get(word, 1) for word in text.split()[1:])

    found = await word_costs(probe)
    assert found.overhead == 11 and set(found.words) == set(WORDS)
    assert all(cost == odd.get(word, 1) for word, cost in zip(found.words, found.costs, strict=True))
    assert len(probes) < 25 and found.costs.count(1) == len(WORDS) - 2
    probes.clear()
    odd.clear()
    await word_costs(probe)
    assert len(probes) == 3


async def test_calibration_refuses_counts_that_do_not_follow_the_words() -> None:
    async def constant(text: str) -> int:
        return 5

    with pytest.raises(ServerError):
        await word_costs(constant)


def test_bodies_force_the_length_and_carry_the_extra_fields() -> None:
    target = Target("http://x", endpoint="/v1/completions", model="m")
    plan = Plan(target, fixed(1, 6, 9), source=TokenIds(), extra_body={"top_k": 1})
    body = plan.body(plan.maker(), fixed(1, 6, 9), 0, 0)
    assert body["max_tokens"] == body["min_tokens"] == 9 and body["ignore_eos"] is True and body["top_k"] == 1
    assert len(body["prompt"]) == 6 and body["model"] == "m" and body["temperature"] == 0.0


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "trace"])
def test_every_workload_is_sound_and_repeatable_without_data(name: str) -> None:
    options = Options(seed=3, offline_lines=200, count=150, rate=None)
    made, again = build(name, options), build(name, options)
    assert made.online is not None or made.jobs
    for one, other in [
        (made.online, again.online),
        *((a.lines, b.lines) for a, b in zip(made.jobs, again.jobs, strict=True)),
    ]:
        if one is None or other is None:
            continue
        assert (one.arrived_at == other.arrived_at).all() and (one.input_tokens == other.input_tokens).all()
        assert (np.diff(one.arrived_at) >= 0).all() and (one.input_tokens > 0).all() and (one.output_tokens > 0).all()
    if made.online is not None and not made.closed_loop:
        assert made.horizon is not None and made.online.arrived_at[-1] <= made.horizon


@pytest.mark.parametrize("source", [lengths.AZURE_CONV, lengths.ARXIV, lengths.SHAREGPT, lengths.HUMANEVAL])
def test_synthetic_lengths_have_the_published_quantiles(source) -> None:
    made = lengths.sample(source, 40_000, 0, None, "offline")
    for column, table in ((made.input_tokens, source.inputs), (made.output_tokens, source.outputs)):
        assert np.percentile(column, [25, 50, 75]) == pytest.approx(table[3:6], rel=0.05)
    assert "SYNTHETIC" in made.notes[0]


def test_synthetic_lengths_have_the_published_means() -> None:
    for source, inputs, outputs in (
        (lengths.AZURE_CONV, 1154.7, 211.1),
        (lengths.ARXIV, 2588.1, 291.4),
        (lengths.SHAREGPT, 2340.0, 438.7),
    ):
        made = lengths.sample(source, 40_000, 0, None, "x")
        assert made.input_tokens.mean() == pytest.approx(inputs, rel=0.06)
        assert made.output_tokens.mean() == pytest.approx(outputs, rel=0.06)


def test_synthetic_arrivals_have_the_published_shape() -> None:
    conversations = lengths.arrivals(lengths.AZURE_CONV, 0, None)
    gaps = np.diff(conversations.arrived_at)
    assert conversations.rate == pytest.approx(5.53, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.09, rel=0.05)
    code = lengths.arrivals(lengths.AZURE_CODE, 0, None)
    busy = np.unique(code.arrived_at // 10).size / np.ceil(code.span / 10)
    assert 1 - busy == pytest.approx(0.56, abs=0.02) and code.rate == pytest.approx(2.57, rel=0.05)


def test_data_files_are_used_when_the_folder_has_them(tmp_path) -> None:
    import gzip

    text = "arrived_at,input_tokens,output_tokens\n" + "".join(f"{n},{n + 1},2\n" for n in range(100))
    (tmp_path / "azure2023_conv.csv.gz").write_bytes(gzip.compress(text.encode()))
    made = build("hygen", Options(data=tmp_path, rate=0.5, offline_lines=10))
    assert made.notes[0] == "arrivals and lengths: azure2023_conv.csv.gz"
    assert made.online is not None and 30 < len(made.online) < 70 and made.horizon == 99.0
    assert any("SYNTHETIC" in note for note in made.notes), "the offline lengths have no file here"


def test_rates_counts_and_durations_are_kept() -> None:
    made = build("apt-chat", Options(rate=20.0, duration=30.0, process="gamma", cv=5.0))
    assert made.horizon == 30.0 and made.online is not None and made.online.arrived_at[-1] < 30.0
    assert len(build("apt-code", Options(rate=3.0, count=77)).online or ()) == 77
    burst = build("llmd-491", Options())
    first = (burst.online.arrived_at < 90).sum()
    assert (
        1200 < first < 1500 and len(burst.online) - first < 130 and [len(job.lines) for job in burst.jobs] == [1000] * 3
    )
    curve = build("random", Options(curve=parse_curve("steps:10@1,10@3"), count=50))
    assert not curve.closed_loop and build("random", Options(count=5)).closed_loop
    single = build("random", Options(count=1, rate=5.0, process="constant"))
    assert single.horizon is None, "one request at time 0: measured to its end"


def test_prefix_batch_and_conversations_share_prefixes() -> None:
    lines = build("prefix-batch", Options(offline_lines=1000)).jobs[0].lines
    groups = [item.segments[0][0] for item in lines.content]
    assert sorted(set(groups)) == list(range(10)) and groups != sorted(groups) and groups.count(4) == 100
    talk = build("chat-multiturn", Options(count=40)).online
    assert talk is not None and len(talk) == 40
    turns = sorted((item.segments for item in talk.content), key=len)
    longest = turns[-1]
    assert any(longest[: len(other)] == other for other in turns if len(other) < len(longest))


def test_clipping_fits_the_context_and_says_so() -> None:
    made = build("hygen", Options(rate=1.0, count=50, offline_lines=50))
    cut = clipped(made, 0.5, 512)
    for trace in (cut.online, cut.jobs[0].lines):
        assert trace is not None and ((trace.input_tokens + trace.output_tokens) <= 512).all()
    assert any("cut to fit 512" in note for note in cut.notes) and any("scaled by 0.5" in note for note in cut.notes)
    assert clipped(made, 1.0, None).notes == made.notes


def test_unknown_workloads_and_missing_traces_are_refused() -> None:
    for name in ("nope", "trace"):
        with pytest.raises(InputError):
            workloads.build(name, Options())
