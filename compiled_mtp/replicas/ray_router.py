"""PrefixRouter: chooses the replica to which a Ray Serve handle sends a call. Imports Ray."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from compiled_mtp.replicas.messages import Call
from compiled_mtp.replicas.routing import prefer


class PrefixRouter(RequestRouter):
    """Prefers the replica of a call's prefix unless that replica has many requests more than another.

    Avoids replicas that lost the call, if there are others. Ray then takes the remaining replica with the
    shortest queue.
    """

    def initialize_state(self, max_imbalance: int = 4) -> None:
        """Set the router up from Ray's `request_router_kwargs`."""
        self._max_imbalance = max_imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas to try, the preferred group first."""
        call: Any = None
        if pending_request is not None:
            # Every try covers all replicas, so Ray may back off before the next try.
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
    """Return the replicas in random order: Ray takes the first of equal queues."""
    return random.sample(list(replicas.values()), len(replicas))
