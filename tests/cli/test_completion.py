"""What shells complete; bash itself runs the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compiled_mtp.cli import completion
from compiled_mtp.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "bash"
    file.write_text(completion.for_bash(completion.read_flags()))
    return file


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("",), set(COMMANDS)),
        (("qu",), {"quantize"}),
        (("serve", "--log-"), {"--log-level", "--log-format", "--log-prompts"}),
        (("serve", "--log-format", ""), {"auto", "text", "json"}),
        (("serve", "--log-format", "t"), {"text"}),
        (("run", "--no-pre"), {"--no-prefix-cache"}),
        (("chat", "--dtype", "b"), {"bfloat16"}),
        (("completion", ""), {"--help", "--version", "bash", "zsh", "fish"}),
        (("bench", "s"), {"serving", "step"}),
        # No words: bash itself completes file names.
        (("run", "--prompt-file", "x"), set()),
        (("none", "--lo"), set()),
    ],
)
def test_bash_completes(script: Path, words: tuple[str, ...], found: set[str]) -> None:
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _compiled_mtp; '
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", code, "bash", str(script), "compiled-mtp", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == found


def test_every_shell_has_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        texts[shell] = capsys.readouterr().out
    assert texts["zsh"] == "autoload -U +X bashcompinit && bashcompinit\n" + texts["bash"]
    lines = texts["fish"].splitlines()
    assert all(line.startswith("complete -c compiled-mtp -n ") for line in lines)
    assert any("-l log-format -x -a 'auto text json' -d 'form of the log" in line for line in lines)


def test_a_command_without_its_packages_has_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compiled_mtp.server.serve", None)
    found = completion.read_flags()
    assert not found["serve"]
    assert found["run"]
