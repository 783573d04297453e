"""A server of the demo model while its engine process is killed, hangs and fails, and while hostile bodies and greedy
tenants come: what its clients notice. Exits 1 when a promise is broken. `make chaos`.

Greedy answers are compared with those that the same server gave undisturbed. A pause counts without the time in which
there was no engine: from a fault until /ready is 200 again.
"""

import argparse
import asyncio
import secrets
import time
from collections.abc import Sequence

from loadgen.bench import chaos_load as load
from loadgen.bench.chaos_parts import PARTS, Promise, Scale
from loadgen.bench.machine import describe


def show(promises: Sequence[Promise], *, loose: bool) -> bool:
    """Print the table; whether every promise was kept. `loose`: those of time are only shown."""
    kept = True
    for promise in promises:
        counts = promise.kept is not None and not (loose and promise.timing)
        verdict = "" if promise.kept is None else "kept" if promise.kept else "BROKEN" if counts else "missed"
        kept = kept and not (counts and not promise.kept)
        print(f"  {promise.name:45} {promise.value:>14} {promise.limit:>10}  {verdict}".rstrip(), flush=True)
    return kept


def parts(text: str) -> list[str]:
    """`kill,hang` as names. Raises ArgumentTypeError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench chaos", description=__doc__)
    parser.add_argument("--parts", type=parts, default=list(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    help_seconds = "how long kills and storm go on; the others in proportion, 600 is the whole of it (default 600)"
    parser.add_argument("--seconds", type=float, default=600.0, help=help_seconds)
    parser.add_argument("--seed", type=int, help="the same faults and prompts again (default: drawn, and printed)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--loose", action="store_true", help="do not fail for times, which a busy machine stretches")
    options = parser.parse_args(argv)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    scale = Scale(seed, options.seconds, options.streams)
    names = ",".join(options.parts)
    print(f"chaos: --parts {names} --seed {seed} --seconds {scale.seconds:g}, {scale.streams} streams of "
          f"{load.STREAM_TOKENS} tokens; {describe()}", flush=True)  # fmt: skip
    broken = []
    for name in options.parts:
        part, begin = PARTS[name], time.monotonic()
        print(f"{name}: {part.__doc__}", flush=True)
        if not show(asyncio.run(part(scale)), loose=options.loose):
            broken.append(name)
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
    if broken:
        raise SystemExit(f"promises broken in: {', '.join(broken)}")


if __name__ == "__main__":
    main()
