"""The caller's torch settings hold on every rank: one rank and two give the same log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.parallel import leader, ranks
from compiled_mtp.parallel.ranks import RankError
from compiled_mtp.request import SamplingParams
from compiled_mtp.runner.numeric_settings import NumericSettings
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of
from tests.parallel.rank_engines import config_of


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = NumericSettings.read()
    yield
    before.apply()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "interval": 2, "hidden_size": 128, "intermediate_size": 256}
    return write_checkpoint(tmp_path_factory.mktemp("settings"), tokenizer=True, **sizes)


def engine_of(directory: Path, world: int, **options: Any) -> Engine:
    return Engine(config_of(directory, world, **options))


def decode(engine: Engine) -> list[tuple[list[int], Any]]:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=5)
    outputs = engine.generate([prompt_of(70, 1, 300), prompt_of(5, 2, 300)], params)
    return [(output.new_token_ids, output.logprobs) for output in outputs]


def set_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def disable_mkldnn() -> None:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def test_settings_made_before_the_start_hold_on_every_rank(directory: Path) -> None:
    """Settings that change between two calls hold too."""
    with engine_of(directory, 1) as engine:
        plain = decode(engine)
        set_precision()
        wanted = decode(engine)
    with engine_of(directory, 2) as engine:
        assert decode(engine) == wanted
        torch.set_float32_matmul_precision("highest")
        assert decode(engine) == plain
        set_precision()
        assert decode(engine) == wanted


def test_bfloat16_without_mkldnn_is_the_same_on_every_rank(directory: Path) -> None:
    disable_mkldnn()
    with engine_of(directory, 1, dtype="bfloat16") as engine:
        wanted = decode(engine)
    with engine_of(directory, 2, dtype="bfloat16") as engine:
        assert decode(engine) == wanted


def test_a_rank_that_cannot_take_a_setting_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the rank takes only the thread settings."""
    first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
    code = (
        "import torch\nfrom compiled_mtp.runner.numeric_settings import NumericSettings\n"
        "NumericSettings.apply = lambda given: torch.set_num_threads(given.num_threads)\n"
    )
    monkeypatch.setattr(ranks, "_CODE", f"{first}\n{code}{import_main}{call}")
    disable_mkldnn()
    with pytest.raises(
        RankError, match="rank 1: its torch's mkldnn_enabled must be rank 0's, False, got True;"
    ):
        engine_of(directory, 2)
    said = leader.fingerprint(directory, has_files=True)
    assert said["torch's mkldnn_enabled"] == "False"
    assert said["instruction set of torch"] == torch.backends.cpu.get_cpu_capability()
