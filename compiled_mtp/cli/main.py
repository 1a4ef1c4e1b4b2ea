"""`compiled-mtp COMMAND`: finds the command's module, which reads the flags after the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from compiled_mtp.terminal.signals import leaving

COMMANDS = {
    "run": "decode prompts: --prompt TEXT, or --prompt-file FILE with one request per line",
    "chat": "talk with a checkpoint in the terminal",
    "serve": "serve OpenAI's and Anthropic's APIs (extra `server`)",
    "export": "compile every shape into a file, from which engines start without compiling",
    "inspect": "show a checkpoint's files, how it would run, and the memory of its weights and caches",
    "quantize": "make an FP8 checkpoint from one in bfloat16",
    "rank-vocabulary": "rank ids by how often they occur in text, for --draft-vocab",
    "bench": "measure a service under load, or a decode step on a GPU",
    "completion": "print a script with which bash, zsh or fish complete commands and flags",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    2: an error, which one line on standard error explains. 130 and 143: Ctrl-C and SIGTERM, also while the
    command's module is imported.
    """
    argv = sys.argv[1:] if argv is None else argv
    # This module imports little at its top: a Ctrl-C during those imports ends in Python's traceback.
    with leaving():
        from compiled_mtp.config import Torchrun

        torchrun = Torchrun()
    if not torchrun.has_others:
        with leaving():
            command = _find(argv[:1])
        return command(argv[1:])
    if torchrun.rank:
        # Only rank 0 reads the flags and prints; this process ends with rank 0.
        with leaving():
            from compiled_mtp.parallel.follower import follow_rank_0
        follow_rank_0()
    from compiled_mtp.parallel.torchrun import rendezvous_of

    rendezvous = rendezvous_of(torchrun)
    try:
        with leaving():
            command = _find(argv[:1])
        return command(argv[1:])
    finally:
        rendezvous.dismiss()


def _find(words: Sequence[str]) -> Callable[[Sequence[str]], int]:
    """Return the `main` of the command in `words`, after importing its module."""
    import argparse

    from compiled_mtp.terminal.flags import Parser

    lines = [f"  {name:<17}{described}" for name, described in COMMANDS.items()]
    parser = Parser(
        prog="compiled-mtp",
        description="Decode Qwen3-Next, Qwen3.5 and Qwen3.6 checkpoints with their own MTP head.",
        epilog="\n".join(["commands (`compiled-mtp COMMAND --help` lists the flags of one):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS))
    name = parser.parse_args(words).command
    command: Callable[[Sequence[str]], int] = import_module(f"compiled_mtp.cli.{name.replace('-', '_')}").main
    return command
