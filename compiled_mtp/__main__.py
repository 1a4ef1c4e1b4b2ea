"""`python -m compiled_mtp`: the same as the console script `compiled-mtp`."""

import sys

from compiled_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
