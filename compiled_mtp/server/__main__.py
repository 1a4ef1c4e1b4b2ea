"""`python -m compiled_mtp.server`: the same as `compiled-mtp serve`."""

import sys

from compiled_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
