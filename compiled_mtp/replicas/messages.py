"""What the ingress and the replicas tell each other. Small: each message is pickled and sent on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from compiled_mtp.request import RequestOutput, SamplingParams


class Call(NamedTuple):
    """One request on its way to a replica. `params` have a seed: every replica must draw the same tokens.

    prefix: what requests share whose prompts begin alike, None for none. avoid: replicas that lost it.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    prefix: str | None = None
    avoid: tuple[str, ...] = ()


class Accepted(NamedTuple):
    """A replica's first message: who decodes the request, and on what. Equal identities mean equal tokens."""

    replica_id: str
    identity: str


class Refused(NamedTuple):
    """A replica's only message: the request is `invalid`, or the replica `full`, or `stopped`."""

    kind: Literal["invalid", "full", "stopped"]
    message: str
    replica_id: str
    retry_after_s: int = 1


# Outputs as a `Teller` tells them. An empty list says that the replica is alive.
Message = Accepted | Refused | list[RequestOutput]


class Teller:
    """Makes of one request's outputs what is sent of them: their history holds the rounds since the last
    output of the choice alone, since the whole of it would be sent again and again."""

    def __init__(self) -> None:
        self._num_told: dict[int, int] = {}

    def tell(self, output: RequestOutput) -> RequestOutput:
        """Return the next output with a history of its own."""
        metrics = output.metrics
        told = self._num_told.get(output.index, 0)
        self._num_told[output.index] = metrics.rounds
        history = replace(metrics.history, rounds=metrics.history.rounds[told : metrics.rounds])
        return output._replace(metrics=metrics._replace(history=history))
