"""A store read by other processes, for a trainer that must not be slowed by its own reading.

Python runs one thread of a process at a time. A thread that launches a GPU's kernels gives way at
every one of them, and gets its turn back late from threads that decode: a step of SmolLM2's drafter
on an H200 took 75 ms, and 215 ms beside the threads that read its next batch
(docs/results-train.md). Tensors come back through shared memory.

Shapes: n tokens, H target width.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from eagle3.errors import StoreError
from eagle3.store.pointer import Where
from eagle3.store.states import StateStore

THREADS = 4
"""Of each process: decoding leaves Python to others, but not all of the time."""

# The store that this process reads, if it is one of those started here.
_opened: list[StateStore] = []


class ReaderProcesses:
    """Spans of a store's tokens, read by processes that end with this one."""

    def __init__(self, where: Where, count: int) -> None:
        self.where, self.count = where, count
        # A copy of this process, as by fork, would hold its locks and its GPU.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, _open, (where,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read_spans(self, spans: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """As `StateStore.read_spans`, each process an equal share of the tokens.

        Raises:
            StoreError: as there, or a process was killed.
        """
        try:
            parts = [self._pool.submit(_read, share) for share in shares(spans, self.count)]
            return _joined(parts)
        except BrokenProcessPool as error:
            raise StoreError(
                f"a process that reads {self.where} was killed; give this machine more memory, or "
                "more of it to share (/dev/shm, `docker run --shm-size`), or set "
                "train.reader_processes to 0"
            ) from error


def shares(spans: Sequence[slice], count: int) -> list[list[slice]]:
    """Spans cut into at most `count` lists of equally many tokens, in order."""
    total = sum(span.stop - span.start for span in spans)
    size = -(-total // count)
    parts: list[list[slice]] = [[]]
    room = size
    for span in spans:
        start = span.start
        while start < span.stop:
            if not room:
                parts.append([])
                room = size
            stop = min(span.stop, start + room)
            parts[-1].append(slice(start, stop))
            room -= stop - start
            start = stop
    return parts


def _joined(parts: list[Future[tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
    found = [part.result() for part in parts]
    return torch.cat([aux for aux, _ in found]), torch.cat([last for _, last in found])


def _open(where: Where) -> None:
    """Open the store in a process of the pool, which lives as long as the one that started it."""
    # Whoever stops a run tells all of its processes; the first of them ends these when it is done.
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _opened.append(StateStore.open(where, threads=THREADS))


def _end_with_parent() -> None:
    """A killed parent closes nothing: its readers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _read(spans: list[slice]) -> tuple[Tensor, Tensor]:
    (store,) = _opened
    return store.read_spans(spans)
