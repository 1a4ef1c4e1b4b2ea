"""What the ingress and the replicas tell each other. Small: each message is pickled and sent on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from compiled_mtp.request import FinishReason, RequestOutput, SamplingParams
from compiled_mtp.sampling.logprobs import TokenLogprob


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


class Part(NamedTuple):
    """A RequestOutput of choice `index`, with the rounds since the last one in the place of its metrics."""

    index: int  # type: ignore[assignment]  # Nobody looks for an item of a part.
    token_ids: list[int]
    text: str
    rounds: list[int]
    seed: int
    mtp_step: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


Message = Accepted | Refused | list[Part]


class PartMaker:
    """Makes the parts of one request's outputs, each round told once."""

    def __init__(self) -> None:
        self._num_told: dict[int, int] = {}

    def make(self, output: RequestOutput) -> Part:
        """Return the part of the next output."""
        metrics, history = output.metrics, output.metrics.history
        told = self._num_told.get(output.index, 0)
        self._num_told[output.index] = metrics.rounds
        return Part(
            index=output.index,
            token_ids=output.new_token_ids,
            text=output.new_text,
            rounds=history.rounds[told : metrics.rounds],
            seed=history.seed,
            mtp_step=history.mtp_step,
            cached_tokens=history.cached_tokens,
            finish_reason=output.finish_reason,
            error=output.error,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
