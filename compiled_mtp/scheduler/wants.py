"""What the requests of a launch need beside their tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compiled_mtp.request import Request


class Wants(NamedTuple):
    """What at least one request of a launch needs beside its tokens.

    Two phases; masks of a grammar; the most likely ids listed with log probabilities (-1: none); log
    probabilities of processed logits; the drafts that the launch leaves. are_all_given: the output of every
    request is given.
    """

    is_two_phase: bool = False
    is_guided: bool = False
    logprobs: int = -1
    has_processed_logprobs: bool = False
    has_drafts: bool = False
    are_all_given: bool = False


NOTHING = Wants()


def wants_of(requests: Sequence[Request]) -> Wants:
    """Return what at least one of the requests needs."""
    has_drafts = any(request.params.include_drafts for request in requests)
    two_phase = [request for request in requests if request.is_two_phase]
    if not two_phase:
        return Wants(has_drafts=has_drafts)
    listed = max(-1 if (most := request.params.logprobs) is None else most for request in two_phase)
    is_guided = any(request.guide is not None for request in two_phase)
    has_processed = any(request.has_processed_logprobs for request in two_phase)
    return Wants(
        True,
        is_guided,
        listed,
        has_processed,
        has_drafts=has_drafts or is_guided,
        are_all_given=all(request.forced_ids for request in requests),
    )
