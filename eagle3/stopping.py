"""How several processes that need each other stop together when one of them is told to.

A signal ends a Python process at any instruction. Processes that each hold a part of the training
state must all be between two steps to write it, so the signal waits until then.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from eagle3.team import Team

HELD = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], Any] | int | None


class HeldSignals:
    """SIGTERM and Ctrl-C of the processes of a team, held back until all can act on them."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.came = 0
        """Number of the signal; 0 for none."""
        self._before: dict[signal.Signals, Handler] = {}
        self._agreed = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note signals instead of acting on them, but for those that this process ignores.

        Python has signals in its main thread alone; elsewhere nothing is held, since none comes.
        """
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def any_came(self) -> bool:
        """Whether a signal came to any process of the team."""
        self._agreed = self.team.largest(self.came)
        return bool(self._agreed)

    def deliver(self) -> None:
        """Send this process the signal that came to one of them; what it does is its own."""
        self._restore()
        signal.raise_signal(self._agreed)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.came = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
