"""Ray Serve's side of routing: which replica a handle sends a call to. Imports Ray."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from compiled_mtp.replicas.messages import Call
from compiled_mtp.replicas.routing import prefer


class PrefixRouter(RequestRouter):
    """Prefers the replica of a call's prefix unless it is loaded, and never one that lost the call before
    while there is another. Among the rest Ray takes the one with the shortest queue.
    """

    def initialize_state(self, max_imbalance: int = 4) -> None:
        """Take `request_router_kwargs`."""
        self._max_imbalance = max_imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, first those to prefer."""
        call: Any = None
        if pending_request is not None:
            # Every try has looked at all replicas: the next one may wait.
            pending_request.routing_context.should_backoff = True
            call = pending_request.args[0] if pending_request.args else None
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        if not replicas:
            return []
        if not isinstance(call, Call):
            return [_shuffled(replicas)]
        allowed = {name: one for name, one in replicas.items() if name not in call.avoid} or replicas
        loads = {
            name: self._replica_queue_len_cache.get(one.replica_id) or 0 for name, one in allowed.items()
        }
        first = prefer(call.prefix, loads, self._max_imbalance)
        if first is None:
            return [_shuffled(allowed)]
        return [[allowed.pop(first)], _shuffled(allowed)]


def _shuffled(replicas: dict[str, RunningReplica]) -> list[RunningReplica]:
    """In another order each time: of equal queues Ray takes the first."""
    return random.sample(list(replicas.values()), len(replicas))
