"""`python -m compiled_mtp.server`: serve a checkpoint."""

import sys

from compiled_mtp.server.serve import main

if __name__ == "__main__":
    sys.exit(main())
