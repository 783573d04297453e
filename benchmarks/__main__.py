"""`python -m benchmarks [serving|control-plane ...]`: the CPU benchmarks, each beside a limit or a peer.

Options behind a single name are that benchmark's: `python -m benchmarks colocation --help`.
"""

import argparse
import importlib
import sys
from itertools import takewhile

BENCHES = {
    "serving": "benchmarks.serving",
    "colocation": "benchmarks.colocation",
    "colocation-peers": "benchmarks.colocation_peers",
    "features": "benchmarks.features",
    "pressure": "benchmarks.pressure",
    "speculation": "benchmarks.speculation",
    "quantization": "benchmarks.quantization",
    "schemas": "benchmarks.schemas",
    "control-plane": "benchmarks.control_plane",
    "chaos": "benchmarks.chaos.main",
    "nights": "benchmarks.nights",
    "sim-vs-live": "benchmarks.sim_vs_live",
    "simulator-speed": "benchmarks.simulator_speed",
    "experiments": "benchmarks.experiments.main",
    "results": "benchmarks.result_tables",
}

DEFAULT = ("serving", "colocation-peers", "control-plane")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(BENCHES)} (default: {', '.join(DEFAULT)})")
    words = sys.argv[1:]
    names = list(takewhile(BENCHES.__contains__, words))
    options = words[len(names) :]
    if not names and options and not options[0].startswith("-"):
        parser.error(f"unknown benchmark '{options[0]}'; known: {', '.join(BENCHES)}")
    if not names or (options and len(names) > 1):
        parser.parse_args(words)  # its help, or an error: options belong to one benchmark
        if options:
            parser.error(f"'{options[0]}': options belong to one benchmark")
    for name in names or DEFAULT:
        if code := importlib.import_module(BENCHES[name]).main(options):
            sys.exit(code)


if __name__ == "__main__":
    main()
