"""`compiled-mtp COMMAND`: finds the command, whose own module reads the flags behind it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from compiled_mtp.cli.console import EXIT_INTERRUPTED, say
from compiled_mtp.cli.flags import Parser

COMMANDS = {
    "run": "decode prompts: --prompt TEXT, or --prompt-file FILE with a request a line",
    "chat": "talk with a checkpoint in the terminal",
    "serve": "serve OpenAI's and Anthropic's APIs (extra `server`)",
    "export": "compile every shape into a file, with which others start without compiling",
    "quantize": "write a bfloat16 checkpoint as one in FP8",
    "rank-vocabulary": "rank ids by how often they occur in text, for --draft-vocab",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for what cannot be done, after one line that says why;
    130 for Ctrl-C while the command is loaded."""
    argv = sys.argv[1:] if argv is None else argv
    lines = [f"  {name:<17}{described}" for name, described in COMMANDS.items()]
    parser = Parser(
        prog="compiled-mtp",
        description="Decode Qwen3-Next, Qwen3.5 and Qwen3.6 checkpoints with their own MTP head.",
        epilog="\n".join(["commands (`compiled-mtp COMMAND --help` lists the flags of one):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS))
    command = parser.parse_args(argv[:1]).command
    try:
        code: int = import_module(f"compiled_mtp.cli.{command.replace('-', '_')}").main(argv[1:])
    except (
        KeyboardInterrupt
    ):  # While it is loaded, torch with it; behind that each command has its own answer.
        say("interrupted: nothing more was done")
        return EXIT_INTERRUPTED
    return code
