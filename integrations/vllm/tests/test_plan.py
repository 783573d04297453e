"""The planner, without vLLM."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tidemill_vllm.plan import EASY_SHARE, FLOOR_TOKENS, Decode, Limits, Load, Planner, Prompt

from predictor.model import LatencyModel

MODEL = LatencyModel(intercept=0.010, decode_context=1e-7, attention=1e-9, knots=(0,), hinges=(1e-3,))
"""A step takes 10 ms and 1 ms for each token."""
LIMITS = Limits(tokens=2048, ttft=1.0, tbt=0.1)


def plan(load: Load, share: float = 1.0, limits: Limits = LIMITS):
    return Planner(MODEL, limits).plan(load, share, limits.tokens)


def test_without_chats_a_step_takes_a_share_of_the_ttft_limit() -> None:
    found = plan(Load(0.0, offline_decodes=[Decode(100, 1)] * 64, offline_prompts=[Prompt(0, 4096)]))
    assert found.num_decodes == 64 and found.num_prompts == 1
    assert 0.29 < found.seconds <= 0.3, "IDLE_SHARE of 1 s"


def test_beside_chats_a_step_ends_before_the_next_token_is_due() -> None:
    chats = [Decode(50, 1, due=0.06, gap=0.1)] * 4
    found = plan(Load(0.0, chats, offline_decodes=[Decode(100, 1)] * 64))
    assert found.seconds <= 0.06 and 40 < found.num_decodes < 64
    assert plan(Load(0.0, chats, offline_decodes=[Decode(100, 1)] * 64), share=0.0).num_decodes == 0


def test_a_prompt_that_waits_goes_before_an_offline_prompt() -> None:
    offline = [Prompt(100, 1000)]
    held = plan(Load(0.0, prompts=[Prompt(0, 50, due=1.0)], offline_prompts=offline, num_running_prompts=1, waits=True))
    assert (held.prompt_tokens, held.num_prompts, held.tokens) == (50, 0, 50)
    both = plan(Load(0.0, prompts=[Prompt(10, 50, due=1.0)], offline_prompts=offline, num_running_prompts=1))
    assert both.prompt_tokens == 50 and both.num_prompts == 1


def test_a_prompt_is_cut_beside_decodes_and_gets_a_floor_beside_late_ones() -> None:
    on_time = plan(Load(0.0, [Decode(50, 1, due=0.1, gap=0.1)], [Prompt(0, 500, due=10.0)]))
    assert 60 < on_time.prompt_tokens < 80 and on_time.seconds <= EASY_SHARE * 0.1
    # 5 ms are left, less than a step of decodes alone: this decode is lost, and the next one is not
    late = plan(
        Load(0.0, [Decode(50, 1, due=0.005, gap=0.1), Decode(50, 1, due=0.02, gap=0.1)], [Prompt(0, 500, due=0.01)])
    )
    assert 0 < late.prompt_tokens <= FLOOR_TOKENS
    lost = plan(Load(0.0, [Decode(50, 1, due=-1.0, gap=0.1)], [Prompt(0, 500, due=0.01)]))
    assert lost.prompt_tokens == 500, "no decode can be saved"


def test_lost_promises_leave_offline_work_its_part() -> None:
    slow = Limits(tokens=2048, ttft=1.0, tbt=0.001)
    chats = [Decode(50, 1, due=-1.0, gap=0.001)]
    beside = plan(Load(0.0, chats, offline_decodes=[Decode(9, 1)] * 64), limits=slow)
    assert 0 < beside.num_decodes < 64
    assert plan(Load(0.0, chats, offline_decodes=[Decode(9, 1)] * 64), share=0.0, limits=slow).num_decodes == 0


def test_chunks_end_at_blocks() -> None:
    limits = Limits(2048, 1.0, 0.1, block=128)
    found = plan(Load(0.0, [Decode(50, 1, due=0.1, gap=0.1)], [Prompt(0, 500, due=10.0)]), limits=limits)
    assert found.prompt_tokens == 128, "no chunk of a block's part"


def test_a_prompt_longer_than_the_step_gets_the_whole_step() -> None:
    limits = Limits(4096, 1.0, 0.1, block=16)
    found = Planner(MODEL, limits).plan(Load(0.0, [], [Prompt(0, 2, due=0.0)]), share=0.0, most=1)
    assert (found.tokens, found.prompt_tokens) == (1, 1)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.floats(-0.1, 1)), max_size=40),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 3000), st.floats(-1, 2)), max_size=8),
    st.lists(st.integers(0, 3000), max_size=80),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 3000)), max_size=8),
    st.integers(1, 4096), st.floats(0, 1), st.booleans(), st.sampled_from([1, 16]),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_any_load(decodes, prompts, offline, offline_prompts, most, share, waits, block) -> None:
    load = Load(
        0.0, [Decode(start, 1, due, 0.1) for start, due in decodes], [Prompt(*each) for each in prompts],
        [Decode(start, 1) for start in offline], [Prompt(*each) for each in offline_prompts], 0, waits,
    )  # fmt: skip
    most = max(most, len(decodes))
    found = Planner(MODEL, Limits(4096, 1.0, 0.1, block=block)).plan(load, share, most)
    assert len(decodes) <= found.tokens <= most and found.num_decodes <= len(offline)
    assert not math.isnan(found.seconds)
    if prompts and most > len(decodes):
        assert found.prompt_tokens > 0, "an online prompt always goes on"
    if (offline or offline_prompts) and not decodes and not prompts:
        assert found.tokens > 0, "without chats something always runs"
