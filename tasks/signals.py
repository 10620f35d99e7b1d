"""A stage process dies with its parent, and says so before it goes."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

from tasks.errors import Terminated

PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux; nothing elsewhere).

    Without it, `kill -9` of dvc leaves a training process that writes into the next attempt's
    result.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before the request was in place
        os.kill(os.getpid(), by)


def end_with_parent() -> None:
    """Ignore SIGTERM and Ctrl-C, and end at once when the parent does, and not before."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def raise_on_sigterm() -> None:
    """Turn SIGTERM into `Terminated`: `finally` blocks run, and the MLflow run is marked KILLED.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_terminated)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
