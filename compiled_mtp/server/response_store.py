"""The answers of /v1/responses that clients may continue: in memory, within a number of bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class StoredResponse:
    """One answer: its object, and the messages that it added to the conversation of `previous`.

    num_bytes: of its JSON. num_holders: the stored answers that continue it, and 1 while it can be found.
    """

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    previous: StoredResponse | None
    num_bytes: int
    num_holders: int = 1

    def conversation(self) -> list[Mapping[str, Any]]:
        """Return the messages of the whole conversation, the oldest first."""
        turns = []
        stored: StoredResponse | None = self
        while stored is not None:
            turns.append(stored.messages)
            stored = stored.previous
        return [message for messages in reversed(turns) for message in messages]


class ResponseStore:
    """Answers by their ids, of at most `max_bytes` of JSON; the least recently used ones leave first.

    An answer that others continue can be removed; its messages stay, and count, until the last of those
    leaves.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def add(
        self,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
    ) -> bool:
        """Keep an answer; return False if its conversation is larger than the store."""
        num_bytes = len(json.dumps([response, messages]))
        self.num_bytes += num_bytes
        self._hold(previous)
        self._found[response["id"]] = StoredResponse(response, messages, previous, num_bytes)
        while self.num_bytes > self._max_bytes and self._found:
            self._release(self._found.popitem(last=False)[1])
        return response["id"] in self._found

    def find(self, response_id: str) -> StoredResponse | None:
        """Return an answer, now the most recently used one; None if it is not here."""
        if response_id not in self._found:
            return None
        self._found.move_to_end(response_id)
        return self._found[response_id]

    def remove(self, response_id: str) -> bool:
        """Remove an answer; return whether it was here."""
        stored = self._found.pop(response_id, None)
        if stored is not None:
            self._release(stored)
        return stored is not None

    def _hold(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.num_holders += 1
            if stored.num_holders > 1:
                return
            # It left while the answer that continues it was decoded.
            self.num_bytes += stored.num_bytes
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.num_holders -= 1
            if stored.num_holders:
                return
            self.num_bytes -= stored.num_bytes
            stored = stored.previous
