"""One tiny vision checkpoint for each family, and transformers' model of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vision.checkpoints import VisionOracle, vision_oracle, write_vision_checkpoint


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision_dense"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision_moe")
    return write_vision_checkpoint(directory, "qwen3_5_moe", trunk_experts="stacked")


@pytest.fixture(scope="session")
def dense_oracle(dense: Path) -> VisionOracle:
    return vision_oracle(dense)


@pytest.fixture(scope="session")
def moe_oracle(moe: Path) -> VisionOracle:
    return vision_oracle(moe)
