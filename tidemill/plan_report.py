"""The planner's answer as text (times in milliseconds) and as JSON (times in seconds)."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from loadgen.plan import window_seconds
from loadgen.simulation.planner import Answer, Arm, ObjectiveCheck
from loadgen.stats import wilson
from loadgen.traces import Trace
from predictor.budget import DEFAULT_CLASS
from predictor.features import BatchFeatures
from tidemill.flags import command_line

HOUR = 3600.0


def show(answer: Answer, model: str, notes: Sequence[str]) -> str:
    """Return the answer as text. `model`: the model in the printed serve command."""
    parts = [_headline(answer), _setting(answer), _table(answer)]
    parts += [_offline(answer)] if answer.offline_only is not None else []
    parts += ["\n".join(f"note: {note}" for note in notes)] if notes else []
    parts += [f"hint: {hint}" for hint in _hints(answer)]
    which = f" (MODEL: a checkpoint of {answer.question.machine.model_name})" if model == "MODEL" else ""
    parts.append(f"serve it with{which}:\n  {serve_command(answer, model)}")
    return "\n\n".join(parts)


def serve_command(answer: Answer, model: str) -> str:
    """Return the command of a server with this SLO, policies and step limits; the server finds the budget itself."""
    asked, simulated = answer.question.config, answer.question.machine.config
    seqs = asked.max_num_seqs or simulated.max_num_seqs
    tokens = asked.max_num_batched_tokens or simulated.max_num_batched_tokens
    rest = command_line(replace(asked, slo=EngineConfig().slo, max_num_seqs=seqs, max_num_batched_tokens=tokens))
    return shlex.join(["tidemill", "serve", model, "--slo", str(answer.question.slo), *rest])


def document(answer: Answer, model: str, notes: Sequence[str]) -> dict[str, Any]:
    """Return the answer as JSON; missing values are `null`."""
    question, search = answer.question, answer.search
    return {
        "schema": 1,
        "device": question.machine.name,
        "model": question.machine.model_name,
        "latency_model_error": question.machine.mape,
        "slo": str(question.slo),
        "kept": answer.kept,
        "traffic": _traffic(answer),
        "objectives": [_objective(verdict) for verdict in answer.verdicts],
        "online_only": _arm(answer.alone),
        "with_offline": _arm(answer.beside),
        "offline_only": _arm(answer.offline_only),
        "offline_tokens_per_hour": _hourly(answer.beside, answer.beside.offline_tokens),
        "jobs": [_job(job.lines, job.completion_window, answer.beside) for job in question.traffic.jobs],
        "budget": {
            "policy": answer.budget.policy,
            "rule": answer.budget.rule,
            "latency_budget": _finite(answer.budget.latency_budget),
            "interference_weight": _finite(answer.budget.lam),
            "decode_value": answer.budget.delta,
            "confirmed": search.confirmed if search is not None else None,
            "evaluations": search.num_evaluations if search is not None else 0,
        },
        "hints": _hints(answer),
        "serve": serve_command(answer, model),
        "notes": list(notes),
    }


def _headline(answer: Answer) -> str:
    machine, beside = answer.question.machine, answer.beside
    where = f"One {machine.name} with {machine.model_name}"
    if answer.alone is None:
        return f"{where}: {_hourly(beside, beside.offline_tokens):,.0f} offline tokens/hour, no online work."
    if not answer.kept and not _alone_keeps(answer):
        return f"{where} does NOT keep this SLO on this traffic, not even without offline work."
    kept = "keeps the SLO" if answer.kept else "does NOT keep the SLO beside offline work"
    if answer.offline_only is None:
        return f"{where} {kept}; no offline work was asked for."
    return f"{where} {kept} and gives {_hourly(beside, beside.offline_tokens):,.0f} offline tokens/hour beside it."


def _alone_keeps(answer: Answer) -> bool:
    slo, alone = answer.question.slo, answer.alone
    assert alone is not None
    return all(v.alone <= v.bound for v in answer.verdicts if v.share is None) and alone.keeps_targets(slo)


def _setting(answer: Answer) -> str:
    question, arm = answer.question, answer.beside
    lines = [f"SLO      {question.slo}"]
    if question.traffic.online is not None and answer.alone is not None:
        found = _traffic(answer)
        lines.append(
            f"traffic  {question.traffic.name}: {found['online_requests']} requests in {arm.seconds:g} s "
            f"({found['online_rate']:.3g}/s), {found['online_prompt_tokens']:.0f} prompt and "
            f"{found['online_output_tokens']:.0f} output tokens on average"
        )
    config = question.machine.config
    room = f"{config.num_units // 2 * config.block_size:,} tokens of cache, context {config.max_model_len:,}"
    lines.append(f"machine  {room}, latency model {question.machine.mape:.1%} off")
    lines.append(f"budget   {_budget(answer)}")
    return "\n".join(lines)


def _budget(answer: Answer) -> str:
    budget, search = answer.budget, answer.search
    if answer.offline_only is None or answer.alone is None:
        return "none: one class of work only"
    found = f"L = {budget.latency_budget * 1e3:.3g} ms a step, rule {budget.rule}"
    if not math.isinf(budget.lam):
        found += f", lambda {budget.lam:.3g}, delta {budget.delta:.3g}"
    if search is None:
        return f"{found} (given)"
    if budget.latency_budget <= 0.0:
        tried = f"{search.num_evaluations} replays"
        return f"0: nothing beside online requests keeps the SLO ({tried}); offline work runs when there are none"
    return f"{found} ({search.num_evaluations} replays, chosen on the first half, confirmed on the half shown here)"


def _hints(answer: Answer) -> list[str]:
    """Suggest more traffic if the requests are too few for the SLO, and larger steps if nothing else binds them."""
    machine, config, slo = answer.question.machine, answer.question.machine.config, answer.question.slo
    hints, found, needed = list[str](), answer.beside.requests, slo.arrivals_needed
    if answer.alone is not None and found < needed:
        few = f"{found} requests are few to judge this SLO by, {needed} would do"
        hints.append(f"{few}: use more of the traffic (--duration)")
    largest = BatchFeatures()
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    longest = machine.model.predict(largest)
    limits = [slo.limit_of(metric) for metric in ("tbt", "tpot")]
    tight = any(limit is not None and limit < 2 * longest for limit in limits)
    if answer.kept and answer.search is not None and answer.budget.latency_budget >= longest and not tight:
        tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
        hints.append(
            f"steps are bound by their {tokens} tokens and {rows} requests, not by the SLO: larger ones may give more "
            f"(--max-num-batched-tokens {4 * tokens} --max-num-seqs {4 * rows})"
        )
    return hints


def _table(answer: Answer) -> str:
    """Return the table of online metrics by objective."""
    if answer.alone is None:
        return "no online requests"
    alone, beside = answer.alone, answer.beside
    both = answer.offline_only is not None
    rows = [("", "online only", "with offline" if both else "", "promised", "")]
    for verdict in answer.verdicts:
        mark, objective = "" if verdict.kept else "MISSED", verdict.objective
        statistic = "mean" if objective.percentile is None else f"P{objective.percentile}"
        bound = _ms(verdict.bound) + ("" if objective.tolerance is None else f" (+{objective.tolerance * 100:g} %)")
        rows.append((f"{objective.metric.upper()} {statistic}", _ms(verdict.alone), _ms(verdict.beside), bound, mark))
        if verdict.share is not None:
            share = alone.shares[objective.key]
            rows.append(("  kept by", f"{share:.2%}", f"{verdict.share:.2%}", f"{verdict.wanted:.0%}", mark))
    for name, slo in answer.question.slo.by_class:
        if (target := slo.attainment_target) is None:
            continue
        share = beside.attainment(name)
        mark = "" if share >= target - 1e-12 else "MISSED"
        low, high = wilson(*beside.judged[name])
        interval = f"{mark} 95 % interval {low:.2%} to {high:.2%}".strip()
        title = "good requests" if name == DEFAULT_CLASS else f"good {name}"
        rows.append((title, f"{alone.attainment(name):.2%}", f"{share:.2%}", f"{target:.0%}", interval))
    rows.append(("requests", str(alone.requests), str(beside.requests), "", ""))
    rows.append(("refused (429)", str(alone.refused), str(beside.refused), "", ""))
    if not both:
        rows = [(title, first, "", promised, mark) for title, first, _, promised, mark in rows]
    return aligned(rows)


def _offline(answer: Answer) -> str:
    """Return the table of offline metrics, next to those of offline work alone."""
    assert answer.offline_only is not None
    alone, beside = answer.offline_only, answer.beside
    rows = [("offline work, an hour", "alone", "beside online" if answer.alone is not None else "")]
    prompts = [arm.offline_tokens - arm.offline_output_tokens for arm in (alone, beside)]
    figures = (
        ("tokens", alone.offline_tokens, beside.offline_tokens),
        ("  prompt", prompts[0], prompts[1]),
        ("  output", alone.offline_output_tokens, beside.offline_output_tokens),
        ("lines", alone.offline_lines, beside.offline_lines),
    )
    for title, first, second in figures:
        rows.append((title, f"{_hourly(alone, first):,.0f}", f"{_hourly(beside, second):,.0f}"))
    lines = [aligned(rows)]
    for number, job in enumerate(answer.question.traffic.jobs, 1):
        found = _job(job.lines, job.completion_window, beside)
        hours = found["hours"]
        took = "makes no progress" if hours is None else f"takes {hours:.2g} h"
        kept = "inside" if found["kept"] else "NOT inside"
        lines.append(f"job {number} of {len(job.lines):,} lines {took}, {kept} its window of {job.completion_window}")
    return "\n".join(lines)


def _job(lines: Trace, window: str, beside: Arm) -> dict[str, Any]:
    """Estimate the duration of a job from its tokens and the rate of the replay."""
    tokens = int(lines.input_tokens.sum() + lines.output_tokens.sum())
    rate = beside.offline_tokens / beside.seconds
    hours = tokens / rate / HOUR if rate > 0.0 else None
    kept = hours is not None and hours * HOUR <= window_seconds(window)
    return {"lines": len(lines), "tokens": tokens, "hours": hours, "completion_window": window, "kept": kept}


def _hourly(arm: Arm, count: int) -> float:
    return count / arm.seconds * HOUR


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds * 1e3:,.0f} ms"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align the first column to the left and numbers to the right; keep the last column as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("   ".join([*cells, row[-1] if len(row) > 3 else row[-1].rjust(widths[-1])]).rstrip())
    return "\n".join(lines)


def _traffic(answer: Answer) -> dict[str, Any]:
    """Describe the online requests of the reported part and how the traffic was split."""
    question, arm = answer.question, answer.alone
    online = question.traffic.online
    if arm is None or online is None:
        return {"name": question.traffic.name, "online_requests": 0}
    return {
        "name": question.traffic.name,
        "seconds": arm.seconds,
        "online_requests": arm.requests,
        "online_rate": arm.requests / arm.seconds,
        "online_prompt_tokens": float(online.input_tokens.mean()),
        "online_output_tokens": float(online.output_tokens.mean()),
    }


def _objective(verdict: ObjectiveCheck) -> dict[str, Any]:
    return {
        "objective": str(verdict.objective),
        "bound": verdict.bound,
        "online_only": verdict.alone,
        "with_offline": verdict.beside,
        "share": verdict.share,
        "wanted": verdict.wanted,
        "kept": verdict.kept,
    }


def _arm(arm: Arm | None) -> dict[str, Any] | None:
    if arm is None:
        return None
    good, judged = arm.judged[DEFAULT_CLASS]
    low, high = wilson(good, judged)
    return {
        "requests": arm.requests,
        "refused": arm.refused,
        "unfinished": arm.unfinished,
        "good": good,
        **arm.attainments,
        "slo_attainment_interval": [low, high],
        **arm.values,
        "seconds": arm.seconds,
        "offline_tokens_per_hour": _hourly(arm, arm.offline_tokens),
        "offline_output_tokens_per_hour": _hourly(arm, arm.offline_output_tokens),
        "offline_lines_per_hour": _hourly(arm, arm.offline_lines),
        "prefix_hits": arm.prefix_hits,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
