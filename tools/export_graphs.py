"""Run `compiled-mtp export` from a source tree that is not installed.

python tools/export_graphs.py --model PATH --output FILE --mtp-step 3 --max-batch 8
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiled_mtp.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
