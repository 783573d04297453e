"""Build an Engine from a runner, its latency profile, a scheduler, an SLO keeper and a grammar compiler.

The SLO controller is built here too; this is the only module of the engine that reads the calendar time.

Settings of a checkpoint besides its model: sampling defaults for fields that a request does not set; embeddings.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import __version__
from engine.api import SamplingParams
from engine.build.plan import gib, out_of_memory, plan_launch, profile_folder, scheduler_config
from engine.build.runner import build_runner, prepare
from engine.cache.placement import HostSplit, restore_costs
from engine.cache.snapshots import snapshots_of
from engine.client import DroppableLayers, EngineInfo, SamplingDefaults
from engine.colocation.keeper import Colocation
from engine.colocation.refit import ModelRefit
from engine.colocation.replay import ReplayedServer, normal_noise
from engine.colocation.tuner import BudgetTuner, LoadStore
from engine.colocation.waits import initial_budget, slo_warning
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.errors import InvalidRequestError, ModelLoadError, first_line
from engine.execution import backend as backends
from engine.execution.plan import LaunchPlan
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner
from engine.forms import EmbeddingSpec, Pooling
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from engine.machine.child import run_child
from engine.machine.facts import BUS_RATE
from engine.models.hub import OWN, TRANSFORMERS
from engine.models.spec import read_json
from engine.profiling.calibration import INSIDE_STRING, CacheTiers, load_or_measure, load_profile, measure_split
from engine.scheduling.policies import find_policy
from engine.scheduling.speculation import Speculation
from engine.structured.compiler import GrammarCompiler
from engine.structured.ready import Grammars, Prover
from predictor.features import LatencyPredictor
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileError, ProfileKey
from predictor.slo import SLO

FILE = "generation_config.json"
READ_TOKENS = 1000
"""Tokens for which the start tells the time of a step from hidden state."""


def read_sampling_defaults(folder: Path) -> tuple[SamplingDefaults, str]:
    """Return the defaults in `generation_config.json`, and a line for the log, empty if it gives none.

    Values out of range are ignored.
    """
    try:
        values = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    except ModelLoadError as error:
        return SamplingDefaults(), f"sampling defaults: none, {error.message}"
    given = {name: values[name] for name in SamplingDefaults._fields if values.get(name) is not None}
    used = {name: value for name, value in given.items() if _is_valid(name, value)}
    if not given:
        return SamplingDefaults(), ""
    told = ", ".join(f"{name} {value}" for name, value in used.items()) or "none"
    ignored = ", ".join(f"{name} {given[name]!r}" for name in given.keys() - used)
    told += f"; ignored: {ignored}" if ignored else ""
    return SamplingDefaults(**used), f"sampling defaults: {told} ({FILE}; --generation-config none turns them off)"


def _is_valid(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        return False
    try:
        SamplingParams(max_tokens=1, **{name: value})  # type: ignore[arg-type]
    except InvalidRequestError:
        return False
    return True


_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


def read_embedding_spec(folder: Path, hidden_size: int) -> EmbeddingSpec:
    """Read the sentence-transformers configuration of a checkpoint; default to the last token's state, normalized."""
    config = _read(folder / "1_Pooling" / "config.json")
    if not isinstance(config, dict):
        return EmbeddingSpec(Pooling.LAST, hidden_size, True, "there is no 1_Pooling/config.json")
    modules = _read(folder / "modules.json")
    names = [str(each.get("type", "")) for each in modules if isinstance(each, dict)] if modules else []
    kinds = [name.rpartition(".")[2] for name in names]
    asked = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    unknown = [*(name for name in asked if name not in _MODES), *(kind for kind in kinds if kind == "Dense")]
    if len(asked) != 1 or unknown:
        why = f"1_Pooling/config.json: {', '.join(unknown or asked) or 'no pooling'} is not supported"
        return EmbeddingSpec(None, hidden_size, False, why)
    normalizes = "Normalize" in kinds or not kinds
    return EmbeddingSpec(_MODES[asked[0]], hidden_size, normalizes, "1_Pooling/config.json")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


log = logging.getLogger("tidemill.engine")


def build_engine(
    config: EngineConfig, plan: LaunchPlan | None = None, say: Callable[[str], None] = lambda _line: None
) -> Engine:
    """Load the model and build its engine; call `start` of the result in an event loop. Raise ConfigError.

    `say` is called with one line for each measurement and decision.
    """
    plan = plan or plan_launch(config)
    find_policy(config.online_policy)  # report an unknown policy before the model is loaded
    if not backends.find_backend(plan.device).leaves_workers:
        return _build(config, plan, say)
    # The OpenMP workers of a thread end with it. More workers than cores sleep at each barrier instead of spinning, and
    # steps of the engine's thread take 1.3 to 2 times as long as in the profile.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-build") as temporary:
        return temporary.submit(_build, config, plan, say).result()


def _build(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> Engine:
    try:
        runner, plan = build_runner(config, plan, say)
        return _join(config, plan, runner, say)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(plan, config, first_line(error)) from None


def stored_profile(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
) -> tuple[LaunchPlan, Profile | None]:
    """Return the plan with its kernels, and the stored latency profile; None if a start would measure one.

    This prepares the backend in this process as a start does. Raise ConfigError.
    """
    plan, _ = prepare(config, plan, say)
    try:
        return plan, load_profile(profile_folder(config), profile_key(plan), plan.limits.held)
    except ProfileError as error:
        say(f"{error}; a start measures again")
        return plan, None


def profile_key(plan: LaunchPlan) -> ProfileKey:
    """Return the key of a launch's latency profile: model, device, precision, version and limits."""
    name = f"{plan.folder.name}, {plan.spec.num_parameters} parameters"
    if plan.implementation == TRANSFORMERS:
        name += ", by transformers"
    if plan.adapters:
        name += f", adapters of rank {', '.join(str(each.rank) for each in plan.adapters)}"
    device = backends.find_backend(plan.device).fingerprint(plan)
    return ProfileKey(
        name,
        device + (f", {plan.offload}" if plan.offload else "") + (", streamed cache" if plan.streams_cache else ""),
        plan.precision,
        __version__,
        str(plan.limits.padding),
        str(plan.limits.reach),
    )


def _join(config: EngineConfig, plan: LaunchPlan, runner: Runner[Any], say: Callable[[str], None]) -> Engine:
    """Add the profile, SLO, budget and grammars to the runner."""
    slo = SLO.parse(config.slo)
    scheduler = scheduler_config(config, plan)
    backend = backends.find_backend(plan.device)
    copy_rate = backend.copy_rate() if plan.host_units else BUS_RATE
    if plan.streams_cache and plan.scratch_blocks:
        scheduler = replace(scheduler, split=_split(plan, runner, scheduler.unit_bytes, say))
    scratch = 0 if scheduler.split else scheduler.scratch_blocks  # the split has its own measurement
    tiers = CacheTiers(scratch, scheduler.host_units, scheduler.unit_bytes, copy_rate)
    profile = load_or_measure(
        profile_folder(config),
        runner,
        plan.limits.held,
        plan.spec.vocab_size,
        profile_key(plan),
        config.profile_seconds,
        say,
        tiers,
        len(plan.adapters),
        partial(runner.can_enforce, INSIDE_STRING),
        partial(backend.busy_share, plan),
        ahead=scheduler.pipeline_depth > 0 and scheduler.ahead_seconds == math.inf,
    )
    runner.device.pool.host.lock_all()  # after the sweep, because steps cannot launch while the driver locks
    drafts = Speculation(penalties=plan.device == "cpu") if drafts_tokens(config, plan) else None
    folder, on_cpu = profile_folder(config), plan.device == "cpu"
    core, colocation, tuner = make_controller(config, scheduler, profile, slo, folder, say, drafts, on_cpu=on_cpu)
    info = replace(_info(plan, scheduler, _sampling(config, plan, say)), slo=str(slo))
    if plan.spec.state_bytes:
        log.debug(_describe_snapshots(plan, scheduler))
    else:
        say(describe_costs(profile.model, core.state.config, on_cpu=on_cpu))
    steps = backend.make_staged(config, plan, runner) if plan.droppable else runner
    if isinstance(steps, PipelineRunner):
        sizes = DroppableLayers(steps.num_layers, steps.layer_bytes, steps.unit_layer_bytes, plan.limits.num_units)
        info = replace(info, droppable=sizes)
    log.debug("%s", info.embedding)
    return Engine(
        core,
        steps,
        info,
        device_lost=runner.lost,
        colocation=colocation,
        tuner=tuner,
        grammars=None if runner.grammars is None else _make_grammars(runner.grammars),
    )


def _split(plan: LaunchPlan, runner: Runner[Any], unit: int, say: Callable[[str], None]) -> HostSplit:
    """Return the split of a streamed cache by the measured costs; `unit`: bytes of a unit."""
    assert plan.offload is not None
    cache, layers = runner.device.pool.stream, runner.device.decoder.weights.layers
    load_kv = plan.stream_seconds * UNITS_PER_BLOCK * unit / plan.offload.streamed_bytes
    cache.paused = layers.paused = True
    try:
        split, costs = measure_split(runner, plan.limits, plan.num_blocks, plan.stream_seconds, load_kv)
    finally:
        cache.paused = layers.paused = False
    log.debug("%s", costs)
    say(f"of the streamed cache {split.act} blocks are hidden state, {split.kv} are keys and values")
    return split


def _make_grammars(compiler: GrammarCompiler) -> Grammars:
    """Load the tokenizer before the first request, because loading holds the interpreter's lock."""
    with suppress(OSError, ValueError):  # requests with a grammar are then refused
        compiler.load()
    return Grammars(compiler, Prover(compiler))


def _describe_snapshots(plan: LaunchPlan, scheduler: SchedulerConfig) -> str:
    """Return a line on the snapshots from which prompts of a recurrent model resume."""
    if not scheduler.state_slots:
        return "no snapshots of recurrent layers: prompts are computed from their first token on"
    taken = gib(scheduler.state_slots * plan.spec.state_bytes)
    host = f", {scheduler.host_state_slots} more on the host" if scheduler.host_state_slots else ""
    return f"{scheduler.state_slots} snapshots of recurrent layers, {taken} of the cache's memory{host}"


def describe_costs(model: LatencyPredictor, config: SchedulerConfig, *, on_cpu: bool) -> str:
    """Return a line on how a preempted request gets its K and V back, with the measured time of a block."""
    costs, size = restore_costs(model, config), config.block_size
    recompute = f"{costs.recompute_seconds(0, size) * 1e3:.2g} ms to recompute"
    copy = UNITS_PER_BLOCK * costs.copy
    if config.host_units:
        pays = "restored from the host" if copy < costs.recompute_seconds(0, size) else "recomputed"
        line = f"preempted requests are {pays}: a block takes {copy * 1e3:.2g} ms to copy and {recompute}"
    elif on_cpu:
        line = f"preempted requests are recomputed: the cache is in host memory already, and a block takes {recompute}"
    else:
        line = f"preempted requests are recomputed: a block takes {recompute}; see --swap-space"
    if config.rho:
        line += f"; {1e3 * READ_TOKENS * config.rho:.2g} ms a step to run {READ_TOKENS} tokens from hidden state"
    return line


def _embedding(plan: LaunchPlan) -> EmbeddingSpec:
    if plan.implementation == OWN:
        return read_embedding_spec(plan.folder, plan.spec.hidden_size)
    return EmbeddingSpec(None, plan.spec.hidden_size, False, "transformers' modules run this model")


def _sampling(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> SamplingDefaults:
    if config.generation_config == "none":
        return SamplingDefaults()
    defaults, line = read_sampling_defaults(plan.folder)
    if line:
        say(line)
    return defaults


def _info(plan: LaunchPlan, scheduler: SchedulerConfig, sampling: SamplingDefaults) -> EngineInfo:
    return EngineInfo(
        max_model_len=plan.limits.max_model_len,
        vocab_size=plan.spec.vocab_size,
        eos_token_ids=plan.spec.eos_token_ids,
        architecture=plan.spec.architecture,
        dtype=plan.precision,
        device=plan.device,
        num_parameters=plan.spec.num_parameters,
        cache_tokens=plan.limits.num_units // UNITS_PER_BLOCK * plan.limits.block_size,
        block_size=plan.limits.block_size,
        max_num_seqs=plan.limits.max_num_seqs,
        embedding=_embedding(plan),
        sampling=sampling,
        scores_prompts=plan.implementation == OWN,
        adapters=tuple(each.name for each in plan.adapters),
        fallbacks=plan.faults,
        shares_prefixes=scheduler.enable_prefix_caching,
        short_context=scheduler.short_context,
    )


def drafts_tokens(config: EngineConfig, plan: LaunchPlan) -> bool:
    """Return whether steps verify drafts: if wanted, and if nothing but the cache depends on the tokens.

    `--speculation auto` wants them on a CPU, since no GPU was measured.
    """
    wanted = config.speculation == "on" or (config.speculation == "auto" and plan.device == "cpu")
    return wanted and not plan.spec.state_bytes and not plan.droppable


def make_controller(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profile: Profile,
    slo: SLO,
    folder: Path,
    say: Callable[[str], None],
    speculation: Speculation | None = None,
    *,
    on_cpu: bool,
) -> tuple[EngineCore, Colocation, BudgetTuner]:
    """Return core, keeper and tuner for a profile. `folder` stores profiles, the learned load and the budgets.

    `on_cpu`: steps use all cores, so that background work beside chats is limited, unless the SLO is a tolerance, under
    which hardly any offline work may run before the first search.
    """
    model = OnlineModel(profile.model, profile.held_out_mape)
    scheduler = replace(scheduler, rho=profile.cache_costs.rho(scheduler.compact_tokens))
    core = EngineCore(
        scheduler,
        online_policy=find_policy(config.online_policy),
        model=model,
        speculation=speculation,
        snapshots=snapshots_of(scheduler, model),
    )
    budget = initial_budget(slo, profile.model)
    if warning := slo_warning(slo, profile.model):
        say(warning)
    log.debug("SLO %s; offline work may extend a step to %.1f ms", slo, budget.latency_budget * 1e3)
    noise = normal_noise(profile.held_out_mape)
    promise = f"{slo}; {config.online_policy}; {_limits(scheduler)}"
    store = LoadStore(folder, profile.key, promise)
    if speculation is not None:
        speculation.traces = store.read_drafts()
    drafts = None if speculation is None else speculation.traces
    server = ReplayedServer(profile.model, slo, scheduler, config.online_policy, noise, drafts)
    calendar = time.time() - time.monotonic()
    load, table = store.read(time.time(), say)
    colocation = Colocation(core, model, slo, budget, calendar=calendar, load=load)
    child = partial(run_child, busy=lambda: core.state.has_online) if on_cpu else run_child
    refit = ModelRefit(colocation, profile, folder / profile.key.filename(), child)
    return core, colocation, BudgetTuner(colocation, server, table, store, child=child, refit=refit)


def _limits(scheduler: SchedulerConfig) -> str:
    """Return the limits of steps and queues as text, without `rho`, which is measured and varies slightly."""
    return ", ".join(f"{name} {value}" for name, value in asdict(scheduler).items() if name not in ("rho", "seed"))
