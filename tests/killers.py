"""Who kills Ray's workers in the middle of what they do."""

import logging
import os
import re
import signal
import threading
import time

import pytest
from listeners import Listener
from s3_server import Requests
from watched import PATIENCE


class Killer(Listener):
    """Kills workers, by the process ids that the log has, once there are shards of theirs."""

    def __init__(self, log: pytest.LogCaptureFixture, all_of_them: bool) -> None:
        super().__init__()
        self.log, self.all_of_them = log, all_of_them
        self.killed: set[int] = set()

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        super().progress(label, done, total, unit)
        if done < 40 or (self.killed and not self.all_of_them):
            return
        started = re.findall(r"Ray worker \d: process (\d+) on", self.log.text)
        for process in set(map(int, started)) - self.killed:
            os.kill(process, signal.SIGKILL)
            self.killed.add(process)
            if not self.all_of_them:
                return


class KillerAtBoth(Requests):
    """Kills the worker that puts the first shard of all, when it makes its other one meanwhile.

    The put is answered only then, so the shard can have no marker. Nor is a put of the other
    worker, which would else come to make that one itself.
    """

    log: pytest.LogCaptureFixture
    shards: int
    """Of all splits."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.made = -1, -1
        self.made_meanwhile = False
        self._first, self._killed = threading.Lock(), threading.Event()

    def handle(self, record: logging.LogRecord) -> bool:
        # Not by logging's way, with a lock: one request is held, the others go on.
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        put = re.search(r"PUT /states/killed/train\S*/aux/c\.(\d+)", record.getMessage())
        if put and self._first.acquire(blocking=False):
            self._kill(int(put[1]))
        elif put:
            self._killed.wait(2 * PATIENCE)

    def asked(self, method: str, file: str) -> int:
        return sum(
            line.startswith(f"{method} killed/train") and line.endswith(f"/{file}")
            for line in self.seen
        )

    def _kill(self, shard: int) -> None:
        # Each worker gets the first two of its half of the shards, of which Ray may start either.
        half = self.shards // 2
        owner, first = (0, 0) if shard < half else (1, half)
        self.written, self.made = shard, 2 * first + 1 - shard
        # Whoever makes a shard first removes what may be left of it.
        marker, end = f"shards/{self.made:05d}.json", time.monotonic() + PATIENCE
        while not self.asked("DELETE", marker) and time.monotonic() < end:
            time.sleep(0.01)
        self.made_meanwhile = time.monotonic() < end
        [process] = re.findall(rf"Ray worker {owner}: process (\d+) on", self.log.text)
        os.kill(int(process), signal.SIGKILL)
        self._killed.set()
