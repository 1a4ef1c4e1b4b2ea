"""`compiled-mtp completion SHELL`: print a script with which a shell completes commands, flags and values.

    source <(compiled-mtp completion bash)
    source <(compiled-mtp completion zsh)
    compiled-mtp completion fish > ~/.config/fish/completions/compiled-mtp.fish

The printed text is complete in itself: no later completion starts Python. Print it again after an upgrade.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module

from compiled_mtp.cli.main import COMMANDS
from compiled_mtp.terminal.console import EXIT_OK, check_stdout, run_command, write_text
from compiled_mtp.terminal.flags import Parser
from compiled_mtp.terminal.signals import leaving

# By command, the flags and the words that stand alone, each with its description and its values.
Flags = Mapping[str, Mapping[str, tuple[str, Sequence[str]]]]

_BASH = """\
_compiled_mtp() {{
    local words="" word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
        *)
            case "$command" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _compiled_mtp compiled-mtp
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for an error, 130 for Ctrl-C or 143 for SIGTERM."""
    return run_command(lambda _: _complete(make_parser().parse_args(argv)))


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the text")
    return parser


def _complete(flags: argparse.Namespace) -> int:
    stdout, found = check_stdout(), read_flags()
    text = for_fish(found) if flags.shell == "fish" else for_bash(found)
    write_text(stdout, (_ZSH if flags.shell == "zsh" else "") + text)
    return EXIT_OK


def read_flags() -> Flags:
    """Return the flags of every command whose packages are installed."""
    found: dict[str, dict[str, tuple[str, Sequence[str]]]] = {}
    for command in COMMANDS:
        try:
            with leaving():
                module = import_module(f"compiled_mtp.cli.{command.replace('-', '_')}")
                actions = module.make_parser()._actions
        except ModuleNotFoundError:
            actions = []
        found[command] = {
            flag: (_first_sentence(action.help or ""), _values_of(action))
            for action in actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings or action.choices or ()
            if flag.startswith("--") or not action.option_strings
        }
    return found


def for_bash(found: Flags) -> str:
    """Return a script for bash, which zsh's bashcompinit reads too."""
    values = [
        f'        "{command} {flag}") words={shlex.quote(" ".join(values))} ;;'
        for command, flags in found.items()
        for flag, (_, values) in flags.items()
        if values
    ]
    flags = [
        f"            {command}) words={shlex.quote(' '.join(flags))} ;;" for command, flags in found.items()
    ]
    commands = shlex.quote(" ".join(found))
    return _BASH.format(commands=commands, values="\n".join(values), flags="\n".join(flags))


def for_fish(found: Flags) -> str:
    """Return the lines of a completion file of fish."""
    lines = []
    for command, flags in found.items():
        described = shlex.quote(_first_sentence(COMMANDS[command]))
        lines.append(f"complete -c compiled-mtp -n __fish_use_subcommand -x -a {command} -d {described}")
        for flag, (said, values) in flags.items():
            if not flag.startswith("--"):
                lines.append(
                    f"complete -c compiled-mtp -n '__fish_seen_subcommand_from {command}' -x -a {flag}"
                )
                continue
            given = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(
                f"complete -c compiled-mtp -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}{given} "
                f"-d {shlex.quote(said)}"
            )
    return "\n".join(lines) + "\n"


def _values_of(action: argparse.Action) -> Sequence[str]:
    """Return the values from which a flag chooses: those of argparse, or a|b of its metavar."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    named = action.metavar if isinstance(action.metavar, str) else ""
    is_list = "|" in named and named.lower() == named
    return named.split("|") if is_list else []


def _first_sentence(text: str) -> str:
    return text.replace("%%", "%").split(";")[0].split(" (default")[0]
