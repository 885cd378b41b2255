"""`RequestQueue`: requests in the order in which they are to be served.

First come, first served, or by priority (lower value first) with arrival breaking ties. Knows requests, no
blocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from paged_backend.request import Request

POLICIES = ("fcfs", "priority")


class RequestQueue:
    """A sorted queue; adding at the end and taking from the front are cheap, as is looking at either end.

    Args:
        policy: `fcfs` ignores priorities.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        # Both lists are sorted with the most urgent request last, where a list pops cheaply.
        self._keys: list[tuple[int, int]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def rank(self, request: Request) -> tuple[int, int]:
        """Sort key: the smaller, the more urgent. Unique to a request and constant over its life."""
        return (request.priority if self._by_priority else 0, request.arrival_index)

    def outranks(self, request: Request, other: Request) -> bool:
        """True when `request` is of a strictly better class than `other`; earlier arrival alone is not enough."""
        return self.rank(request)[0] < self.rank(other)[0]

    def add(self, request: Request) -> None:
        """Insert in order."""
        key = self._key(request)
        index = bisect.bisect(self._keys, key)
        self._keys.insert(index, key)
        self._requests.insert(index, request)

    def first(self) -> Request:
        """The most urgent request."""
        return self._requests[-1]

    def last(self) -> Request:
        """The least urgent request."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it is."""
        index = bisect.bisect_left(self._keys, self._key(request))
        assert self._requests[index] is request, f"request {request.request_id} is not queued"
        del self._keys[index], self._requests[index]

    def _key(self, request: Request) -> tuple[int, int]:
        priority, arrival = self.rank(request)
        return (-priority, -arrival)
