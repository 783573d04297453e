"""`python -m loadgen.bench [serving|control-plane ...]`: the CPU benchmarks, each beside a limit or a peer."""

import argparse
import importlib

BENCHES = {
    "serving": "loadgen.bench.serving",
    "control-plane": "loadgen.bench.control_plane",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help="which ones (default: all)")
    args = parser.parse_args()
    for name in args.names or BENCHES:
        importlib.import_module(BENCHES[name]).main()


if __name__ == "__main__":
    main()
