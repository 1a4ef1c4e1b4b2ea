"""Looks at the requests that decode: which positions they may write next, and for how many rounds none ends.

The planner does this whenever a request comes or goes, with many requests at nearly every round: each request
is read once.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from compiled_mtp.plan import new_tuple
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest


class Decoding(NamedTuple):
    """A request that decodes: its rounds whose results are unread, the fewest tokens that it will have after
    these, and the last position that the round after them may write."""

    scheduled: ScheduledRequest
    in_flight: int
    least_output: int
    last_write: int


def find_decoding(resources: Resources, unread: Counter[tuple[int, int]]) -> list[Decoding]:
    """Return the requests with a finished prompt and at least one token to come.

    unread: the rounds whose results are unread, by slot and generation.
    """
    limits, found = resources.limits, list[Decoding]()
    width, reach = limits.max_drafts + 1, limits.max_drafts + limits.mtp_step
    for scheduled in resources.owners.values():
        if scheduled.phase is not RequestPhase.RUNNING or scheduled.transfer is not None:
            continue
        request, known = scheduled.request, scheduled.known
        in_flight, num_emitted = unread[scheduled.slot, scheduled.generation], scheduled.num_emitted
        # Every unread round emits at least one token.
        least_output = num_emitted + scheduled.is_first_token_due + in_flight
        is_planned = known is not None and bool(request.forced_ids) and known.is_planned
        if least_output < request.max_output and not is_planned:
            # The first token is right after the prompt, read or not; later tokens count once they are read. A
            # round writes its verify rows and then its chain.
            pos = request.prompt_len + (num_emitted - 1 if num_emitted else 0)
            last_write = pos + in_flight * width + reach
            found.append(new_tuple(Decoding, (scheduled, in_flight, least_output, last_write)))
    return found


def certain_rounds(limits: Limits, one: Decoding) -> int:
    """Return how many of the next rounds cannot be the request's last and have their blocks."""
    scheduled, in_flight, least_output, last_write = one
    width = limits.max_drafts + 1
    # Each result may be read before the next launch.
    most_output = least_output + in_flight * limits.max_drafts
    rounds = -((most_output - scheduled.request.max_output) // width)
    owned = len(scheduled.block_ids)
    if owned < scheduled.most_blocks:
        rounds = min(rounds, (owned * limits.block_size - 1 - last_write) // width + 1)
    return rounds
