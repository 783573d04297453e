"""`tidemill profile`: measure step times on this machine, store the fitted model, and show its error."""

import importlib
import sys
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.profiling.calibration import INSIDE_STRING, Calibration, measure_profile


def run(config: EngineConfig, say: Callable[[str], None]) -> int:
    """Measure, store and print a profile; return the exit code. Raise ConfigError if the file cannot be written."""
    build = importlib.import_module("engine.build")
    runner, plan = build.build_runner(config, build.plan_launch(config), say)
    key = build.profile_key(plan)

    def progress(count: int, spent: float) -> None:
        if not sys.stdout.isatty():
            return
        print(f"\r{count} step shapes, {spent:.0f} of at most {config.profile_seconds:.0f} s", end="", flush=True)

    calibration = measure_profile(
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
        calibration.profile.save(path)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    print("\n".join(table(calibration)))
    say(f"profile written to {path}")
    return 0


def table(calibration: Calibration) -> list[str]:
    """Format the held-out error of both feature sets, and about 12 held-out steps, measured and predicted."""
    lines = [
        f"{len(calibration.train)} step shapes measured, {len(calibration.held_out)} more held out",
        f"{'feature set':12} {'held-out MAPE':>14}",
    ]
    lines += [f"{name:12} {error:>13.2%}" for name, error in calibration.mape.items()]
    lines.append(f"{'tokens':>7} {'decodes':>8} {'context':>9} {'measured ms':>12} {'predicted ms':>13} {'error':>7}")
    model = calibration.profile.model
    ordered = sorted(calibration.held_out, key=lambda sample: sample.seconds)
    for features, seconds in ordered[:: max(1, len(ordered) // 12)]:
        predicted = model.predict(features)
        context = features.decode_context_sum
        lines.append(
            f"{features.num_tokens:7d} {features.num_decodes:8d} {context:9d} {seconds * 1e3:12.2f} "
            f"{predicted * 1e3:13.2f} {predicted / seconds - 1:>+7.1%}"
        )
    return lines
