"""`python -m compiled_mtp.run`: the same as `compiled-mtp run`."""

import sys

from compiled_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
