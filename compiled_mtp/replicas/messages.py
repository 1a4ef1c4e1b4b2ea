"""Messages between the ingress and the replicas. Ray pickles and sends each separately, so all but the pixels
of images are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.vision.images import PreparedImage


class Call(NamedTuple):
    """One request to a replica.

    params: with a seed, so that every replica draws the same tokens. prefix: a key that requests share if
    their prompts begin alike, or None. avoid: ids of the replicas that lost or refused the request. images:
    the prompt's images; the prompt has all their pads.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    prefix: str | None = None
    avoid: tuple[str, ...] = ()
    images: tuple[PreparedImage, ...] = ()


class Accepted(NamedTuple):
    """A replica's first message: it decodes the request. Replicas of equal identity decode equal tokens."""

    replica_id: str
    identity: str


class Refused(NamedTuple):
    """A replica's only message: the request is `invalid`, or the replica is `full` or `stopped`."""

    kind: Literal["invalid", "full", "stopped"]
    message: str
    replica_id: str
    retry_after_s: int = 1


# Outputs come from a `HistoryTrimmer`. An empty list is a heartbeat.
Message = Accepted | Refused | list[RequestOutput]


class HistoryTrimmer:
    """Trims the history of one request's outputs to the rounds since the choice's last output.

    Without it each output would repeat the history of all rounds before it.
    """

    def __init__(self) -> None:
        self._num_sent: dict[int, int] = {}

    def trim(self, output: RequestOutput) -> RequestOutput:
        """Return a copy of the next output with a trimmed history."""
        metrics = output.metrics
        num_sent = self._num_sent.get(output.index, 0)
        self._num_sent[output.index] = metrics.rounds
        history = replace(metrics.history, rounds=metrics.history.rounds[num_sent : metrics.rounds])
        return output._replace(metrics=metrics._replace(history=history))
