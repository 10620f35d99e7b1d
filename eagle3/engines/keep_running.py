"""Start and stop the vLLM server that the stages of a project share (eagle3/engines/shared.py)."""

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil

from eagle3.artifacts import TargetModel, write_atomically
from eagle3.config import Params
from eagle3.engines.server import (
    STOP_LIMIT_S,
    EngineInstall,
    StartedServer,
    find_engine,
    signal_group,
    start_server,
    stop_server,
    wait_until_healthy,
)
from eagle3.engines.shared import (
    LOCK,
    LOG,
    RECORD,
    SHARED,
    STATES,
    SharedServer,
    Wanted,
    find_shared,
    running,
)
from eagle3.engines.vllm_server import server_arguments, target_options
from eagle3.errors import EngineError
from eagle3.target.folder import trusted_folder

LOOK_S = 0.05
PATIENCE_S = 1.0
"""Whoever looks whether the lock is held takes it for a moment; it is asked for again so long."""


def start_shared(target: TargetModel, params: Params, folder: Path = SHARED) -> SharedServer:
    """Start a server that answers and gives states for this project, and outlives this process.

    It listens on 127.0.0.1. One that runs and fits is left as it is. If this process ends while it
    waits for the server, so does that.

    Raises:
        EngineError: one runs that does not fit, one is being started, there is no vLLM, or it did
            not start.
    """
    dtype, longest = params.target.dtype, params.corpus.longest_text
    wanted = Wanted.of(target, dtype, longest)
    if server := find_shared(wanted, folder):
        return server
    engine = find_engine()
    home = trusted_folder(target, TargetModel.home)
    with _locked(folder) as lock:
        _clear(folder)
        states = folder.resolve() / STATES
        states.mkdir()
        options = target_options(target, home, dtype, longest, states)
        with _started(engine, server_arguments(options, engine), folder / LOG, lock) as started:
            record = SharedServer(pid=started.process.pid, url=started.client.url, is_for=wanted)
            write_atomically(folder / RECORD, record.model_dump_json(indent=2) + "\n")
    return record


def stop_shared(folder: Path = SHARED) -> bool:
    """End the server with its children, and remove what it left; false if none runs.

    Raises:
        EngineError: one is being started, or does not end.
    """
    server = running(folder)
    if not folder.exists():
        return False
    with (folder / LOCK).open("a") as lock:
        # The process that leads asks the others, and insists; if it is gone, nobody does.
        if server and not (_asked(server.pid) and _take(lock, STOP_LIMIT_S)):
            signal_group(server.pid, signal.SIGKILL)
        _require(lock, folder)
        _clear(folder)
    return server is not None


def _asked(pid: int) -> bool:
    """Ask a process to end; false if it has ended."""
    try:
        process = psutil.Process(pid)
        # One that nobody has waited for can still be signalled.
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.terminate()
    except psutil.NoSuchProcess:
        return False
    return True


@contextmanager
def _started(
    engine: EngineInstall, arguments: Sequence[str], log_file: Path, lock: IO[str]
) -> Iterator[StartedServer]:
    """A server that answers; it stays if the `with` ends well, and is stopped otherwise."""
    read, write = os.pipe()
    # Closed without a byte, as the end of this process does, the pipe ends the server.
    with os.fdopen(write, "wb", buffering=0) as tell, ExitStack() as undo:
        with os.fdopen(read, "rb"):
            leash = f"{os.getpid()}:{read}:{lock.fileno()}"
            server = start_server(engine, arguments, log_file, leash, (read, lock.fileno()))
        undo.callback(stop_server, server)
        wait_until_healthy(server)
        yield server
        tell.write(b".")
        undo.pop_all()


@contextmanager
def _locked(folder: Path) -> Iterator[IO[str]]:
    """The lock of the folder; processes that inherit the file keep it locked.

    Raises:
        EngineError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        _require(lock, folder)
        yield lock


def _require(lock: IO[str], folder: Path) -> None:
    if not _take(lock, PATIENCE_S):
        raise EngineError(
            f"{folder} belongs to a server that runs, starts or ends; `eagle3 engine status` says "
            "more, `eagle3 engine stop` ends it"
        )


def _take(lock: IO[str], patience_s: float) -> bool:
    """Lock a file, which may take a while; false if somebody holds it all that time."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        else:
            return True


def _clear(folder: Path) -> None:
    (folder / RECORD).unlink(missing_ok=True)
    shutil.rmtree(folder / STATES, ignore_errors=True)
