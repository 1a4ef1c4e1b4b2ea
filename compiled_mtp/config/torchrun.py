"""Torchrun: what torchrun tells each process that it starts."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from compiled_mtp.errors import check


class Torchrun(BaseSettings):
    """The variables that torchrun sets in each process that it starts; run_id is None in others."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True)

    run_id: str | None = Field(default=None, validation_alias="TORCHELASTIC_RUN_ID")
    restart_count: int = Field(default=0, validation_alias="TORCHELASTIC_RESTART_COUNT")
    rank: int = Field(default=0, validation_alias="RANK")
    world_size: int = Field(default=1, validation_alias="WORLD_SIZE")
    local_world_size: int = Field(default=1, validation_alias="LOCAL_WORLD_SIZE")
    master_port: int = Field(default=0, validation_alias="MASTER_PORT")

    @model_validator(mode="before")
    @classmethod
    def _ignore_others(cls, values: Any) -> Any:
        # Other launchers set some of the same names.
        return values if values.get("TORCHELASTIC_RUN_ID") else {}

    @property
    def has_others(self) -> bool:
        """Whether torchrun has started more processes than this one."""
        return self.run_id is not None and self.world_size > 1

    def check_ranks(self, tensor_parallel: int) -> None:
        """Raise ValueError if torchrun or another launcher started other processes than one per rank here."""
        if self.has_others:
            rule = f"be {self.world_size}, the number of processes that torchrun started"
            fits = tensor_parallel == self.world_size
            remedy = "give --nproc-per-node and tensor_parallel the same number"
            check(fits, "tensor_parallel", rule, tensor_parallel, remedy)
            rule = f"be {self.world_size}, so that all ranks share a machine"
            fits, remedy = self.local_world_size == self.world_size, "start them with --nnodes 1"
            check(fits, "LOCAL_WORLD_SIZE", rule, self.local_world_size, remedy)
        elif self.run_id is None and tensor_parallel > 1:
            others, remedy = os.environ.get("WORLD_SIZE", "1"), "unset it, or start with torchrun"
            check(others == "1", "WORLD_SIZE", "be unset without torchrun", others, remedy)
