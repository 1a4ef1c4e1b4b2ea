"""Ranks that torchrun starts: rank 0 alone speaks, the tokens are those of one process, all end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import export
from compiled_mtp.config import EngineConfig, Torchrun
from compiled_mtp.engine import Engine
from compiled_mtp.parallel import follower, torchrun
from compiled_mtp.request import SamplingParams, derive_seed
from compiled_mtp.terminal.console import start_engine
from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# What is due after a rank is lost.
MOST_S = 10.0
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 16,
    "prefill_chunk": 64,
    "max_model_len": 4096,
    "num_blocks": 260,
    "max_batch": 2,
    "num_threads": 1,
    "mtp_step": 2,
    "offload_gb": 0.0,
    "compile": "off",
}
PARAMS: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "ignore_eos": True}
PROMPTS = ("hello", "and you")
SCRIPT = """
import json, os, sys
from compiled_mtp import Engine, EngineConfig, SamplingParams
print("begins", os.environ["RANK"], os.getpid(), flush=True)
config, params = (json.loads(given) for given in sys.argv[1:3])
for _ in range(2):
    with Engine(EngineConfig(**config)) as engine:
        outputs = engine.generate(["hello"], SamplingParams(**params))
print("tokens", json.dumps(outputs[0].new_token_ids), flush=True)
engine = Engine(EngineConfig(**config))
engine.generate(["hello"], SamplingParams(**params | {"max_tokens": 4000}))
print("was not killed")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "interval": 2}
    return write_checkpoint(tmp_path_factory.mktemp("torchrun"), tokenizer=True, **sizes)


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[list[int]]:
    """What one process decodes."""
    with Engine(EngineConfig(model=directory, **OPTIONS)) as engine:
        # As the command gives them out.
        seeds = [derive_seed(PARAMS["seed"], index) for index in range(len(PROMPTS))]
        outputs = engine.generate(PROMPTS, [SamplingParams(**PARAMS | {"seed": seed}) for seed in seeds])
    return [output.new_token_ids for output in outputs]


def start(folder: Path, world: int, *command: str) -> subprocess.Popen[str]:
    """torchrun, with a port that was free and a temporary folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(port))
    return subprocess.Popen(
        [sys.executable, *words, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )


def flags(given: dict[str, Any]) -> list[str]:
    names = {name: f"--{name.replace('_', '-')}" for name in given}
    return [names[name] if value is True else f"{names[name]}={value}" for name, value in given.items()]


def test_a_command_speaks_once_and_decodes_what_one_process_does(
    directory: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """--compare has a second engine."""
    out = tmp_path / "results.jsonl"
    words = [*flags(OPTIONS | PARAMS | {"tensor_parallel": 2, "model": directory, "output": out})]
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    process = start(tmp_path, 2, "-m", "compiled_mtp.run", *words, *prompts, "--compare", "--in-order")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("identical tokens: yes") == said.count("the same again with mtp_step 0") == 1
    assert [json.loads(line)["token_ids"] for line in out.read_text().splitlines()] == wanted
    assert not list(tmp_path.glob("compiled_mtp*"))


def test_a_long_temporary_folder_has_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    listener, connection = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with torchrun.address_of(folder) as address:
        assert len(address) <= 107
        listener.bind(address)
        listener.listen(1)
    assert (folder / "rank_0").is_socket()
    with torchrun.address_of(folder) as address:
        connection.connect(address)
    listener.close()
    connection.close()


def test_a_killed_rank_ends_a_script(directory: Path, wanted: list[list[int]], tmp_path: Path) -> None:
    """Which has had two engines before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = OPTIONS | {"tensor_parallel": 2, "model": str(directory)}
    process = start(tmp_path, 2, str(script), json.dumps(config), json.dumps(PARAMS))
    assert process.stdout is not None
    pids: dict[str, int] = {}
    for line in process.stdout:
        match line.split(maxsplit=2):
            case ["begins", rank, pid]:
                pids[rank] = int(pid)
            case ["tokens", *tokens]:
                assert json.loads(" ".join(tokens)) == wanted[0]
                break
    # The third engine decodes.
    time.sleep(1.0)
    begin = time.monotonic()
    os.kill(pids["1"], signal.SIGKILL)
    rest, said = process.communicate(timeout=60)
    assert time.monotonic() - begin < MOST_S
    assert process.returncode == 1
    assert "was not killed" not in rest
    assert f"got rank 1: process {pids['1']} ended, see torchrun's output; create the engine again" in said
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, **names: Any) -> Torchrun:
    """This process as torchrun would have started it."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in (given | names).items():
        monkeypatch.setenv(name, str(value))
    return Torchrun()


def test_its_processes_are_the_ranks(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, tmp_path)
    assert EngineConfig(tensor_parallel=2).tensor_parallel == 2
    message = (
        "^tensor_parallel must be 2, the number of processes that torchrun started, got {}; give --nproc"
    )
    with pytest.raises(ValueError, match=message.format(4)):
        EngineConfig(tensor_parallel=4)
    # Engines of a script's own, one a process, are its own affair.
    alone = EngineConfig(model=directory)
    with pytest.raises(ValueError, match=message.format(1)):
        start_engine(alone)
    words = [f"--output={tmp_path / 'x.zip'}", "--tensor-parallel=2"]
    assert export.main(words) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(
        ValueError, match=r"^LOCAL_WORLD_SIZE must be 2, so that all ranks share a machine, got"
    ):
        EngineConfig(tensor_parallel=2)
    # Of other starters nothing is known, and their names may mean something else.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("RANK", "first")
    assert not Torchrun().has_others
    with pytest.raises(
        ValueError, match=r"^WORLD_SIZE must be unset without torchrun, got 2; unset it, or st"
    ):
        EngineConfig(tensor_parallel=2)


def test_who_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "RENDEZVOUS_S", 0.1)
    told(monkeypatch, tmp_path, RANK=1)
    with pytest.raises(ValueError, match=r"^rank 0 must create an engine within 0 s, got none; let every"):
        follower.follow_rank_0()
    launch = told(monkeypatch, tmp_path)
    follower.follow_rank_0()
    rendezvous = torchrun.Rendezvous(launch)
    job: Any = None
    with pytest.raises(
        ValueError, match=r"^ranks must all create the engine within 0 s, got none from \[1\]"
    ):
        rendezvous.join(job)
    rendezvous.dismiss()
    torchrun.folder_of(launch).chmod(0o777)
    with pytest.raises(ValueError, match=r"^TMPDIR must hold a folder that only you may access, got"):
        torchrun.Rendezvous(launch)


class Job:
    """As much of one as is sent."""

    plans, wake, report = 0, 1, 2


def joined(monkeypatch: pytest.MonkeyPatch, code: str) -> tuple[torchrun.JoinedRank, subprocess.Popen[bytes]]:
    """A rank whose process runs `code`, with its end of the connection as `end`."""
    monkeypatch.setattr(torchrun, "_END_S", 0.3)
    own, other = socket.socketpair()
    code = f"import socket, time; end = socket.socket(fileno={other.fileno()}); {code}"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[other.fileno()])
    other.close()
    job: Any = Job()
    return torchrun.JoinedRank(own, process.pid, job), process


def test_a_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, process = joined(monkeypatch, "time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.01)
    rank.kill()
    assert (rank.wait(5), process.wait(5)) == (1, -signal.SIGKILL)


def test_a_rank_that_is_told_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose engine has ended in the meantime."""
    code = "end.send(b'.'); reads = iter(lambda: end.recv(4096), b''); sum(1 for _ in reads)"
    rank, process = joined(monkeypatch, code)
    assert rank.wait(20) == 0
    rank.returncode = None
    rank.kill()
    assert (rank.wait(5), process.wait(5)) == (1, 0)
