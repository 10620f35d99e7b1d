"""A stage process dies with its parent, and says so before it goes."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

from tasks.errors import Terminated

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends (Linux; nothing elsewhere).

    Without it, `kill -9` of dvc leaves a training process that writes into the next attempt's
    result.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the request was in place
        os.kill(os.getpid(), signal.SIGTERM)


def raise_on_sigterm() -> None:
    """Turn SIGTERM into `Terminated`: `finally` blocks run, and the MLflow run is marked KILLED.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_terminated)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
