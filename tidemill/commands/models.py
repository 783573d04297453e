"""`tidemill pull`: show the size of a model on the Hugging Face hub, then download it with the hub's library.
`tidemill profile`: measure step times on this machine, store the fitted model, and show its error.

Files go into the hub's cache, where `tidemill serve` finds them. A broken connection resumes where it broke. An
interrupted pull keeps complete files and downloads the unfinished one again.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine.folders import user_folder
from predictor.profile import Profile
from tidemill.commands.preflight import line, size


def pull(name: str, revision: str | None, say: Callable[[str], None]) -> int:
    """Download a model and return the exit code. Raise ConfigError or ModelLoadError on failure."""
    if not {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys():
        user_folder("cache", "HF_HOME")  # raises without a home folder, where the hub's library writes to `~` itself
    from engine.models import hub

    offer = hub.look_up(name, revision)
    spec = hub.check_offer(offer)
    print("\n".join(describe(offer, spec)), flush=True)
    if offer.missing_bytes:
        _check_disk(offer)
    folder = hub.fetch(offer)
    shown = f"{name} --revision {revision}" if revision else name
    say(f"{name} is in {folder}; next: tidemill serve {shown}")
    return 0


def describe(offer: Any, spec: Any) -> list[str]:
    """Return lines that compare the model with free disk and memory. `offer` is an engine.models.hub.Offer."""
    from engine.execution.memory import available_memory

    memory = available_memory()
    weights = f"weights {size(offer.weight_bytes)} of {size(memory)} free"
    if offer.weight_bytes > memory:
        weights += ": more than the free host memory (GPU memory is not counted)"
    here = "all downloaded" if not offer.missing_bytes else f"{size(offer.missing_bytes)} to download"
    return [
        line("model", f"{offer.name} at {offer.commit[:12]}: {spec.num_parameters:,} parameters in {spec.dtype}"),
        line("files", f"{len(offer.files)}, {size(offer.total_bytes)} in all, {here}"),
        line("disk", f"{size(_free(offer.cache))} free at {offer.cache}"),
        line("memory", weights),
    ]


def _check_disk(offer: Any) -> None:
    free = _free(offer.cache)
    if offer.missing_bytes > free:
        raise ConfigError(
            f"{offer.name} needs {size(offer.missing_bytes)} more, and {offer.cache} has {size(free)} free; free space "
            f"or run HF_HOME=/another/disk tidemill pull {offer.name}"
        )


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def profile(config: EngineConfig, say: Callable[[str], None]) -> int:
    """Measure, store and print a profile; return the exit code. Raise ConfigError if the file cannot be written."""
    from engine import build
    from engine.profiling.calibration import INSIDE_STRING, measure_profile

    runner, plan = build.build_runner(config, build.plan_launch(config), say)
    key = build.profile_key(plan)

    def progress(count: int, spent: float) -> None:
        if not sys.stdout.isatty():
            return
        print(f"\r{count} step shapes, {spent:.0f} of at most {config.profile_seconds:.0f} s", end="", flush=True)

    measured = measure_profile(
        runner,
        plan.limits,
        plan.spec.vocab_size,
        key,
        config.profile_seconds,
        progress,
        adapters=len(plan.adapters),
        masks=runner.can_enforce(INSIDE_STRING),
    )
    if sys.stdout.isatty():
        print()
    path = build.profile_folder(config) / key.filename()
    try:
        measured.save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    print("\n".join(table(measured)))
    say(f"profile written to {path}")
    return 0


def table(profile: Profile) -> list[str]:
    """Format the held-out error, and about 12 of the measured steps with their predicted times."""
    lines = [
        f"{profile.num_samples} step shapes measured, held-out error {profile.held_out_mape:.2%}",
        f"{'tokens':>7} {'decodes':>8} {'context':>9} {'measured ms':>12} {'predicted ms':>13} {'error':>7}",
    ]
    ordered = sorted(profile.sweep, key=lambda sample: sample.seconds)
    for features, seconds in ordered[:: max(1, len(ordered) // 12)]:
        predicted = profile.model.predict(features)
        context = features.decode_context_sum
        lines.append(
            f"{features.num_tokens:7d} {features.num_decodes:8d} {context:9d} {seconds * 1e3:12.2f} "
            f"{predicted * 1e3:13.2f} {predicted / seconds - 1:>+7.1%}"
        )
    return lines
