"""`python -m loadgen`: the same as `tidemill bench`."""

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
