"""`python -m loadgen.bench [serving|control-plane ...]`: the CPU benchmarks, each beside a limit or a peer.

Options behind a single name are that benchmark's: `python -m loadgen.bench colocation --help`.
"""

import argparse
import importlib
import sys

BENCHES = {
    "serving": "loadgen.bench.serving",
    "colocation": "loadgen.bench.colocation",
    "colocation-peers": "loadgen.bench.colocation_peers",
    "pressure": "loadgen.bench.pressure",
    "turns": "loadgen.bench.turns",
    "chaos": "loadgen.bench.chaos",
    "accuracy": "loadgen.bench.accuracy",
    "control-plane": "loadgen.bench.control_plane",
    "offload": "loadgen.bench.offload",
    "quantization": "loadgen.bench.quantization",
    "structured": "loadgen.bench.structured",
    "planning": "loadgen.bench.planning",
    "sim-vs-live": "loadgen.bench.sim_vs_live",
}

DEFAULT = ("serving", "control-plane", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(BENCHES)} (default: {', '.join(DEFAULT)})")
    words = sys.argv[1:]
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:first], words[first:]
    if not names or (options and len(names) > 1):
        parser.parse_args(words)  # its help, or an error: options belong to one benchmark
    for name in names or DEFAULT:
        if name not in BENCHES:
            parser.error(f"unknown benchmark '{name}'; known: {', '.join(BENCHES)}")
    for name in names or DEFAULT:
        importlib.import_module(BENCHES[name]).main(options)


if __name__ == "__main__":
    main()
