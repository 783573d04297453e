"""/metrics: observations of answers, statistics of the engine, and the names of vLLM."""

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from fake_engine import MODEL, Served, colocation_stats
from fixtures import StartServer
from prometheus_client.parser import text_string_to_metric_families
from support.http import get
from support.lazy import openai

from engine.api import RequestClass
from engine.client import EngineStats
from engine.text.tokenizer import Tokenizer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(served: Served) -> Samples:
    answer = await get(served, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    labels = {key.rstrip("_"): text for key, text in labels.items()}
    return samples[name, frozenset(labels.items())]


async def ask(served: Served, **fields: object) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(**{"model": MODEL, "prompt": "hi", **fields})  # type: ignore[call-overload]
        if fields.get("stream"):
            assert [chunk async for chunk in answer]


async def test_times_and_tokens_by_class(start_server: StartServer, tokenizer: Tokenizer) -> None:
    served = await start_server("hello world")
    size = len(tokenizer.encode("hello world")) + 1
    await ask(served)
    await ask(served, stream=True)
    await ask(served, extra_body={"service_tier": "flex"})
    samples = await scrape(served)
    for name in ("time_to_first_token", "request", "request_queue", "request_prefill", "request_decode"):
        assert value(samples, f"tidemill_{name}_seconds_count", class_="online") == 2, name
        assert value(samples, f"tidemill_{name}_seconds_count", class_="offline") == 1, name
    assert value(samples, "tidemill_time_between_tokens_seconds_count", class_="online") == 2 * (size - 1)
    assert value(samples, "tidemill_generated_tokens_total", class_="online") == 2 * size
    assert value(samples, "tidemill_generated_tokens_total", class_="offline") == size
    assert value(samples, "tidemill_prompt_tokens_total", class_="online") == 2 * len(tokenizer.encode("hi"))
    assert value(samples, "tidemill_requests_total", class_="online", reason="stop") == 2
    # the fake engine's clock: one hundredth of a second from each event to the next
    assert value(samples, "tidemill_time_to_first_token_seconds_sum", class_="online") == pytest.approx(0.02)
    gaps = value(samples, "tidemill_time_between_tokens_seconds_sum", class_="online")
    assert gaps == pytest.approx(0.01 * 2 * (size - 1))
    total = value(samples, "tidemill_request_seconds_sum", class_="online")
    assert total == pytest.approx(0.02 * size)
    times = ("request_queue_time", "request_prefill_time", "request_decode_time")
    for name in ("time_to_first_token", "e2e_request_latency", *times):  # the names of vLLM count online work alone
        assert value(samples, f"vllm:{name}_seconds_count", model_name=MODEL) == 2, name
        assert value(samples, f"vllm:{name}_seconds_bucket", model_name=MODEL, le="+Inf") == 2, name
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(samples, f"vllm:{name}_count", model_name=MODEL) == 2 * (size - 1)
    assert value(samples, "vllm:generation_tokens_total", model_name=MODEL) == 2 * size
    assert value(samples, "vllm:request_success_total", model_name=MODEL, finished_reason="stop") == 2


async def test_ends_are_counted_by_reason(start_server: StartServer) -> None:
    served = await start_server("hello world again", fail_after=2)
    with pytest.raises(openai.APIError):
        await ask(served)
    await ask(served, max_tokens=1)
    samples = await scrape(served)
    counts = {
        r: value(samples, "tidemill_requests_total", class_="online", reason=r) for r in ("error", "length", "abort")
    }
    assert counts == {"error": 1, "length": 1, "abort": 0}
    assert value(samples, "tidemill_request_seconds_count", class_="online") == 1
    assert value(samples, "tidemill_http_responses_total", status="500") == 1
    assert value(samples, "tidemill_http_responses_total", status="200") == 1


async def test_figures_of_the_engine(start_server: StartServer) -> None:
    served = await start_server()
    assert not [name for name, _ in await scrape(served) if name == "vllm:lora_requests_info"]
    served.engine.info = replace(served.engine.info, adapters=("sql", "poet", "tales"))
    served.engine.snapshot = EngineStats(
        running={RequestClass.ONLINE: 2, RequestClass.OFFLINE: 7},
        running_adapters={3: 1, 1: 4},
        waiting={RequestClass.ONLINE: 1, RequestClass.OFFLINE: 90},
        units_total=100,
        units_free=10,
        units_cached=30,
        units_owned=60,
        prefix_queried_tokens=1000,
        prefix_hit_tokens=250,
        prefix_host_hit_tokens=100,
        state_slots_total=12,
        state_slots_used=5,
        preemptions={"memory": 3, "latency": 4},
        steps=50,
        failed_steps=1,
        step_seconds=2.5,
        prefill_tokens=800,
        decode_tokens=90,
    )
    samples = await scrape(served)
    assert value(samples, "tidemill_requests_running", class_="offline") == 7
    assert value(samples, "tidemill_requests_waiting", class_="online") == 1
    assert value(samples, "tidemill_device_units") == 100
    states = {s: value(samples, "tidemill_device_units_by_state", state=s) for s in ("free", "cached", "owned")}
    assert states == {"free": 10, "cached": 30, "owned": 60}
    assert value(samples, "tidemill_state_slots") == 12 and value(samples, "tidemill_state_slots_used") == 5
    assert value(samples, "tidemill_prefix_hit_tokens_total") == 250
    tiers = {t: value(samples, "tidemill_prefix_hit_tokens_by_tier_total", tier=t) for t in ("device", "host")}
    assert tiers == {"device": 150, "host": 100}
    assert value(samples, "tidemill_preemptions_total", cause="memory") == 3
    assert value(samples, "tidemill_steps_total") == 50 and value(samples, "tidemill_failed_steps_total") == 1
    assert value(samples, "tidemill_step_seconds_total") == 2.5
    assert value(samples, "tidemill_decode_tokens_total") == 90
    assert value(samples, "vllm:num_requests_running", model_name=MODEL) == 2
    assert value(samples, "vllm:num_requests_waiting", model_name=MODEL) == 1
    labels = {"model_name": MODEL, "block_size": "16", "num_gpu_blocks": "50"}
    assert value(samples, "vllm:cache_config_info", **labels) == 1
    lora = {"max_lora": "3", "running_lora_adapters": "sql,tales", "waiting_lora_adapters": ""}
    assert abs(time.time() - value(samples, "vllm:lora_requests_info", **lora)) < 3600
    stats = served.engine.snapshot
    assert stats is not None and stats.units_total
    usage = value(samples, "vllm:kv_cache_usage_perc", model_name=MODEL)
    assert usage == pytest.approx(stats.units_owned / stats.units_total) and 0 < usage < 1
    assert value(samples, "vllm:prefix_cache_queries_total", model_name=MODEL) == stats.prefix_queried_tokens
    assert value(samples, "vllm:prefix_cache_hits_total", model_name=MODEL) == stats.prefix_hit_tokens


async def test_how_the_slo_is_kept(start_server: StartServer) -> None:
    served = await start_server()
    assert ("tidemill_slo_attainment", frozenset()) not in await scrape(served)
    keeper = colocation_stats()
    served.engine.snapshot = EngineStats(
        predicted_seconds=4.0, leftover_seconds=3.0, leftover_used_seconds=2.5, colocation=keeper
    )
    samples = await scrape(served)
    expected = {
        "slo_attainment": 0.75,
        "latency_budget_seconds": 0.05,
        "interference_weight": 0.5,
        "predictor_mape": 0.04,
        "breaker_openings_total": 3,
        "offline_tokens_total": 12345,
        "offline_share": 0.0,
        "offline_held": 1.0,
        "online_rate": 1.5,
        "predicted_step_seconds_total": 4.0,
        "leftover_seconds_total": 3.0,
        "leftover_used_seconds_total": 2.5,
    }
    assert {name: value(samples, f"tidemill_{name}") for name in expected} == expected
    assert value(samples, "tidemill_slo_requests_total", good="false") == 10
    states = [value(samples, "tidemill_breaker_state", state=state) for state in ("closed", "half_open", "open")]
    assert states == [0, 1, 0]
    shown = (await get(served, "/ready")).json()["colocation"]
    assert shown["held"] == keeper.held and shown["budget_origin"] == keeper.budget_origin
    assert shown["objectives"]["tbt_mean=5%"] == {"value": 0.05, "bound": None, "attainment": None}, "not known yet"
    assert value(samples, "tidemill_slo_objective_value_seconds", objective="ttft_p99=1s") == 0.9
    assert value(samples, "tidemill_slo_objective_attainment", objective="ttft_p99=1s") == 0.75
    assert math.isnan(value(samples, "tidemill_slo_objective_bound_seconds", objective="tbt_mean=5%"))
    assert shown["offline_share"] == 0.0 and shown["breaker"] == "half_open"


async def test_labels_hold_no_ids(start_server: StartServer) -> None:
    served = await start_server(api_key=())
    await ask(served, extra_body={"user": "somebody"})
    samples = await scrape(served)
    texts: Iterable[str] = [text for _, labels in samples for _, text in labels]
    assert not any("somebody" in text or "cmpl" in text or "req-" in text for text in texts)


async def test_two_applications_count_apart(start_server: StartServer) -> None:
    first, second = await start_server("a"), await start_server("b")
    await ask(first)
    assert value(await scrape(first), "tidemill_requests_total", class_="online", reason="stop") == 1
    assert value(await scrape(second), "tidemill_requests_total", class_="online", reason="stop") == 0
