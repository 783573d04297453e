"""`python -m loadgen.bench [serving|control-plane ...]`: the CPU benchmarks, each beside a limit or a peer."""

import argparse
import importlib

BENCHES = {
    "serving": "loadgen.bench.serving",
    "colocation": "loadgen.bench.colocation",
    "pressure": "loadgen.bench.pressure",
    "accuracy": "loadgen.bench.accuracy",
    "control-plane": "loadgen.bench.control_plane",
    "planning": "loadgen.bench.planning",
    "sim-vs-live": "loadgen.bench.sim_vs_live",
}

DEFAULT = ("serving", "control-plane", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(BENCHES)} (default: {', '.join(DEFAULT)})")
    args = parser.parse_args()
    for name in args.names or DEFAULT:
        if name not in BENCHES:
            parser.error(f"unknown benchmark '{name}'; known: {', '.join(BENCHES)}")
        importlib.import_module(BENCHES[name]).main([])


if __name__ == "__main__":
    main()
