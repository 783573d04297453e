"""`python -m loadgen.bench [serving|control-plane ...]`: the CPU benchmarks, each beside a limit or a peer.

Options behind a single name are that benchmark's: `python -m loadgen.bench colocation --help`.
"""

import argparse
import importlib
import sys
from itertools import takewhile

BENCHES = {
    "serving": "loadgen.bench.serving",
    "colocation": "loadgen.bench.colocation",
    "colocation-peers": "loadgen.bench.colocation_peers",
    "pressure": "loadgen.bench.pressure",
    "turns": "loadgen.bench.turns",
    "overload": "loadgen.bench.overload",
    "chaos": "loadgen.bench.chaos.main",
    "accuracy": "loadgen.bench.accuracy",
    "control-plane": "loadgen.bench.control_plane",
    "offload": "loadgen.bench.offload",
    "quantization": "loadgen.bench.quantization",
    "modules": "loadgen.bench.modules",
    "page": "loadgen.bench.page",
    "structured": "loadgen.bench.structured",
    "schemas": "loadgen.bench.schemas",
    "structured-beside": "loadgen.bench.structured_beside",
    "neighbours": "loadgen.bench.neighbours",
    "host": "loadgen.bench.host",
    "planning": "loadgen.bench.planning",
    "recurrent": "loadgen.bench.recurrent",
    "sim-vs-live": "loadgen.bench.sim_vs_live",
}

DEFAULT = ("serving", "colocation-peers", "control-plane", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench", description=__doc__)
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
        importlib.import_module(BENCHES[name]).main(options)


if __name__ == "__main__":
    main()
