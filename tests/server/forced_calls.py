"""A call of a tool as models write it, and the check that an engine's grammar takes it."""

from __future__ import annotations

from typing import Any

from compiled_mtp.sampling.tool_calls import from_tools
from tests.sampling.grammars import compiler
from tests.sampling.test_tool_calls import takes
from tests.server.serving import ScriptedEngine

CALLS = {
    "xml": "<think>\nWhere?\n</think>\n\nLooking é.\n\n<tool_call>\n<function=get_weather>\n"
    "<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "json": "<think>\nWhere?\n</think>\n\nLooking é.\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
}


def check_forced_calls(engine: ScriptedEngine, form: Any, call: str, is_parallel: bool) -> None:
    """Check that the engine's grammar takes `call`, and two calls only if is_parallel."""
    params = engine.seen[-1][1]
    assert params.parallel_tool_calls is is_parallel
    source = from_tools(
        params.tools, params.tool_choice, form, (), parallel_tool_calls=params.parallel_tool_calls
    )
    assert source is not None
    assert takes(compiler(), source, call)
    assert takes(compiler(), source, f"{call}\n{call}") is is_parallel
