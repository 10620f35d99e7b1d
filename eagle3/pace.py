"""How fast training goes, and how much of its time it waits for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """Tokens per second and the share of time spent waiting for data, since it was made."""

    def __init__(self) -> None:
        self.tokens = 0
        self._started = time.monotonic()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside counts as waiting for data."""
        asked = time.monotonic()
        yield
        self._waited += time.monotonic() - asked

    def figures(self) -> dict[str, float]:
        """As metrics."""
        seconds = time.monotonic() - self._started
        return {"tokens_per_second": self.tokens / seconds, "data_wait": self._waited / seconds}
