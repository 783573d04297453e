"""Entry point of `python -m loadgen`, equal to `tidemill bench`."""

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
