"""Retries, rate and concurrency of requests to a server."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agentic_ring.errors import ConfigError


@dataclass(frozen=True)
class RequestPolicy:
    """Timeouts, retries, rate and concurrency of requests to a server.

    Attributes:
      timeout: seconds before a request counts as lost; reading 512K tokens takes minutes.
      attempts: number of attempts before a question counts as failed.
      first_wait: seconds to wait after the first failed attempt; doubled after each further one.
      longest_wait: maximum of that wait in seconds; a server's Retry-After may be longer.
      longest_retry_after: maximum wait in seconds that a server's Retry-After can cause.
      requests_per_minute: maximum rate; None for no limit.
      concurrency: maximum number of requests at a time.

    Raises:
      ConfigError: a number is out of range.
    """

    timeout: float = 600.0
    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    longest_retry_after: float = 300.0
    requests_per_minute: float | None = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not self.timeout > 0 or self.attempts < 1:
            raise ConfigError(f"timeout is {self.timeout} s, attempts {self.attempts}; both must be positive")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; at least 1 request must be allowed")
        if self.requests_per_minute is not None and not self.requests_per_minute > 0:
            raise ConfigError(
                f"requests_per_minute is {self.requests_per_minute}; give a positive number, or leave it out"
            )

    def wait(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after a failed attempt, counted from 0, of which the server may have asked some."""
        if retry_after is not None:
            return min(retry_after, self.longest_retry_after)
        doubled = min(self.first_wait * 2**attempt, self.longest_wait)
        return doubled * random.uniform(0.75, 1.25)  # so that several runs do not retry at the same moment


class RequestSlots:
    """Keeps the requests of several threads to the rate and concurrency of a policy.

    The number of slots is halved when the server has too many requests (429) and grows by one a round of
    successes, up to the policy's, as TCP does on a congested link.
    """

    def __init__(self, policy: RequestPolicy):
        self._policy = policy
        self._changed = threading.Condition()
        self._slots = float(policy.concurrency)
        self._taken = 0
        self._next_start = time.monotonic()

    @property
    def slots(self) -> int:
        """Number of requests that are allowed at a time now."""
        return int(self._slots)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Waits until one more request is allowed at a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self.slots)
            self._taken += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify()

    def wait_for_rate(self) -> None:
        """Waits until the next request may start."""
        if self._policy.requests_per_minute is None:
            return
        with self._changed:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + 60 / self._policy.requests_per_minute
        time.sleep(max(0.0, start - time.monotonic()))

    def refused(self) -> None:
        """Notes that the server has too many requests."""
        with self._changed:
            self._slots = max(1.0, self._slots / 2)

    def answered(self) -> None:
        """Notes that a request was answered."""
        with self._changed:
            self._slots = min(float(self._policy.concurrency), self._slots + 1 / self._slots)
            self._changed.notify()
