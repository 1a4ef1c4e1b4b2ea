"""`compiled-mtp serve`: the service, if its packages are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from compiled_mtp.terminal.console import EXIT_USAGE, say
from compiled_mtp.terminal.flags import Parser
from compiled_mtp.terminal.signals import leaving


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code."""
    try:
        with leaving():
            from compiled_mtp.server.serve import main as serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("compiled_mtp"):
            raise
        say(f"error: serve needs the package {error.name}, got none; pip install 'compiled-mtp[server]'")
        return EXIT_USAGE
    return serve(argv)


def make_parser() -> Parser:
    """Return the parser of the flags. Raises ModuleNotFoundError without the extra `server`."""
    parser: Parser = import_module("compiled_mtp.server.serve").make_parser()
    return parser
