"""`tidemill profile`: measure step times on this machine, store the fitted model, and show its error."""

import importlib
import sys
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.profiling.calibration import INSIDE_STRING, measure_profile
from predictor.profile import Profile


def run(config: EngineConfig, say: Callable[[str], None]) -> int:
    """Measure, store and print a profile; return the exit code. Raise ConfigError if the file cannot be written."""
    build = importlib.import_module("engine.build")
    runner, plan = build.build_runner(config, build.plan_launch(config), say)
    key = build.profile_key(plan)

    def progress(count: int, spent: float) -> None:
        if not sys.stdout.isatty():
            return
        print(f"\r{count} step shapes, {spent:.0f} of at most {config.profile_seconds:.0f} s", end="", flush=True)

    profile = measure_profile(
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
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    print("\n".join(table(profile)))
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
