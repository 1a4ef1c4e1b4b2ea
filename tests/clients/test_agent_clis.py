"""Sessions of agents for the terminal: one call of their shell, its result, an answer (make clients).

The engine is scripted: the agents' first prompts are longer than the context of the checkpoint that ships.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.server.serving import Running, ScriptedEngine, make_family, running

pytestmark = pytest.mark.clients
CALL = """{thought}Let me look.

<tool_call>
<function={tool}>
<parameter={argument}>
echo hi > made.txt && cat made.txt
</parameter>{more}
</function>
</tool_call>"""


class Scripts(ScriptedEngine):
    """Says the next of `texts` at every request, the last one from then on."""

    texts: Sequence[str] = ()

    def add_request(self, *arguments: Any, **fields: Any) -> str:
        """Add a request, like the engine."""
        self.say(self.texts[min(len(self.seen), len(self.texts) - 1)], chunk=4)
        return super().add_request(*arguments, **fields)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Running, Scripts]]:
    model = make_family(tmp_path / "m", "xml")
    engine = Scripts(Tokenizer(model))
    with running(engine, model, 200_000, prompt_timeout_s=60.0) as server:
        yield server, engine


def run_agent(folder: Path, words: Sequence[str], **environment: str) -> str:
    """Run an agent in a folder and home of its own; return what it printed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed; make clients installs it where there is npm")
    home = folder / "home"
    home.mkdir()
    (folder / "work").mkdir()
    done = subprocess.run(
        words,
        cwd=folder / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_session(engine: Scripts, folder: Path, said: str) -> None:
    assert "Done: it says hi." in said
    assert (folder / "work" / "made.txt").read_text() == "hi\n"
    assert "cat made.txt" in engine.tokenizer.decode(engine.seen[1][0])


def test_codex(served: Any, tmp_path: Path) -> None:
    server, engine = served
    call = CALL.format(thought="", tool="exec_command", argument="cmd", more="")
    engine.texts = (call, "Done: it says hi.")
    provider = f'{{name="own", base_url="{server.url}/v1", wire_api="responses"}}'
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", "m"]
    flags += ["-c", "model_provider=own", "-c", f"model_providers.own={provider}"]
    said = run_agent(tmp_path, ["codex", "exec", *flags, "Make a file."], CODEX_HOME=str(tmp_path / "home"))
    check_session(engine, tmp_path, said)


def test_claude_code(served: Any, tmp_path: Path) -> None:
    server, engine = served
    more = "\n<parameter=description>\nMake a file\n</parameter>"
    thought = "A file.\n</think>\n\n"
    call = CALL.format(thought=thought, tool="Bash", argument="command", more=more)
    engine.texts = (call, f"{thought}Done: it says hi.")
    said = run_agent(
        tmp_path,
        ["claude", "--print", "Make a file.", "--model", "m", "--allowedTools", "Bash"],
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_SMALL_FAST_MODEL="m",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    check_session(engine, tmp_path, said)
