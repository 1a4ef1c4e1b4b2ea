"""Finds stop strings in a stream of text, reading each character once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string that a stream of text completes.

    "First" counts characters, so the result does not depend on how tokens or windows cut the text. If several
    stop strings end at one character, the longest counts. Source: Aho and Corasick, "Efficient string
    matching", 1975: a tree of all prefixes of stop strings, in which `_fallback` is the node of the longest
    proper suffix of a prefix that is a prefix too.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self.stops = tuple(stops)
        self.include_stop = include_stop
        self._held = ""
        self._node = 0
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        # Length of the longest stop that ends at a node, 0 for none.
        self._stop_length = [0]
        self._depth = [0]
        for stop in self.stops:
            self._insert(stop)
        if self.stops:
            self._link()

    def add(self, text: str, *, can_end: bool = True) -> tuple[str, bool]:
        """Take more text; return the text that is safe to show, and whether a stop string was found.

        Holds back the longest suffix that may begin a stop string. Without can_end it ignores a stop string
        that this text completes; a stop string that begins in the text may still be found later.
        """
        if not self.stops:
            return text, False
        node = self._node
        for index, char in enumerate(text):
            node = self._advance(node, char)
            if can_end and self._stop_length[node]:
                whole = self._held + text[: index + 1]
                self._held, self._node = "", 0
                return whole if self.include_stop else whole[: -self._stop_length[node]], True
        whole = self._held + text
        shown = len(whole) - self._depth[node]
        self._held, self._node = whole[shown:], node
        return whole[:shown], False

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _advance(self, node: int, char: str) -> int:
        """Return the node of the longest suffix, including `char`, that is a prefix of a stop string."""
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._children[node].get(char)
            if child is None:
                child = self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._stop_length.append(0)
                self._depth.append(self._depth[node] + 1)
            node = child
        self._stop_length[node] = len(stop)

    def _link(self) -> None:
        """Fill in the fallbacks, shortest prefixes first: each follows from its parent's."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                fallback = self._advance(self._fallback[node], char)
                self._fallback[child] = fallback
                self._stop_length[child] = self._stop_length[child] or self._stop_length[fallback]
                queue.append(child)
