"""Break a server of the demo model part by part and check the effects on its clients: the engine process killed, hung
and failing, hostile requests. Exit 1 on a broken promise. `make chaos`.
"""

import argparse
import asyncio
import secrets
import time

from benchmarks.chaos.engine import PARTS
from benchmarks.chaos.promises import Scale, show
from benchmarks.machine import describe


def parts(text: str) -> list[str]:
    """Split `kill,hang` into names. Raises ArgumentTypeError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--parts", type=parts, default=list(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    help_seconds = "size of each part: 600 is the whole of it, other numbers scale it (default 600)"
    parser.add_argument("--seconds", type=float, default=600.0, help=help_seconds)
    parser.add_argument("--seed", type=int, help="number from which faults and prompts are drawn (default: drawn)")
    parser.add_argument("--clients", type=int, default=8, help="clients with mixed requests beside a fault (default 8)")
    parser.add_argument("--loose", action="store_true", help="do not fail for times, which a busy machine stretches")
    options = parser.parse_args(argv)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    scale = Scale(seed, options.seconds, options.clients)
    names = ",".join(options.parts)
    print(f"chaos: --parts {names} --seed {seed} --seconds {scale.seconds:g}, {scale.clients} clients; "
          f"{describe()}", flush=True)  # fmt: skip
    broken = []
    for name in options.parts:
        part, begin = PARTS[name], time.monotonic()
        print(f"{name}: {part.__doc__}", flush=True)
        if not show(asyncio.run(part(scale)), loose=options.loose):
            broken.append(name)
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
    if broken:
        raise SystemExit(f"promises broken in: {', '.join(broken)}")
