"""tools/README.md names every tool, and only commands that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TOOL = "bench_engine"
TOOLS = Path(__file__).parents[2] / "tools"


def test_every_tool_has_a_row(tool: Any) -> None:
    text = (TOOLS / "README.md").read_text()
    for path in sorted({*TOOLS.iterdir()} - {TOOLS / "README.md", TOOLS / "__pycache__"}):
        assert re.search(rf"\b{re.escape(path.name)}", text), path.name
    named = re.findall(r"python tools/([\w/]+\.py)", text)
    assert all((TOOLS / name).exists() for name in named)
    assert [*tool.SCENARIOS] == re.findall(r"bench_engine\.py ([\w-]+)", text)
