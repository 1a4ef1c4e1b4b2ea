"""The requests that have not ended, and the outputs that no caller has taken."""

from __future__ import annotations

from collections.abc import Collection

from compiled_mtp.errors import quote
from compiled_mtp.request import FinishReason, RequestOutput
from compiled_mtp.scheduler.last_outputs import cut_short
from compiled_mtp.scheduler.planner import Planner
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest


class LiveRequests:
    """Ends requests, and hands out what they gained.

    choices: the choices that have not ended, by request id. outputs: those not taken yet, the oldest first.
    """

    def __init__(self, planner: Planner, resources: Resources) -> None:
        self._planner, self._resources = planner, resources
        self.choices: dict[str, list[ScheduledRequest]] = {}
        self.outputs: list[RequestOutput] = []

    def find(self, request_id: str) -> list[ScheduledRequest]:
        """Return the choices of a request that have not ended. Raises ValueError if there are none."""
        choices = self.choices.get(request_id)
        if choices is None:
            raise not_live(request_id)
        return list(choices)

    def take_outputs(
        self, request_ids: Collection[str] | None = None, excluding: Collection[str] = ()
    ) -> list[RequestOutput]:
        """Return, once, the outputs of these requests; of all requests except `excluding` for None."""
        taken: list[RequestOutput] = self.outputs
        left: list[RequestOutput] = []
        if request_ids is not None or excluding:
            is_taken = [
                output.request_id not in excluding
                if request_ids is None
                else output.request_id in request_ids
                for output in self.outputs
            ]
            taken = [output for output, is_one in zip(self.outputs, is_taken, strict=True) if is_one]
            left = [output for output, is_one in zip(self.outputs, is_taken, strict=True) if not is_one]
        self.outputs = left
        return taken

    def end(self, scheduled: ScheduledRequest, reason: FinishReason, error: str | None = None) -> None:
        """End a request now; its last output has the reason and the error."""
        self.outputs.append(cut_short(scheduled.request, reason, error, self.outputs))
        self.finish(scheduled)

    def finish(self, scheduled: ScheduledRequest) -> None:
        """Take slot, blocks and place in the queue from a request whose last output is made."""
        choices = self.choices[scheduled.request.request_id]
        choices.remove(scheduled)
        if not choices:
            del self.choices[scheduled.request.request_id]
        self._planner.leave(scheduled)
        self._resources.give_back(scheduled)
        self._planner.drop_dead_round()


def id_in_use(request_id: str) -> ValueError:
    """Return the error for an id that another request still uses."""
    return ValueError(f"request_id must be unused, got {quote(request_id)}; choose another")


def not_live(request_id: str) -> ValueError:
    """Return the error for an id without a live request."""
    return ValueError(
        f"request_id must name a request that has not finished, got {quote(request_id)}; give a live one"
    )
