"""Local servers with user interfaces: started on 127.0.0.1, waited for, and stopped with us."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ServerError
from tasks.signals import die_with_parent
from tasks.tracking import root, tracking_uri

HOST = "127.0.0.1"
SECONDS_TO_START = 180.0
SECONDS_TO_STOP = 15.0


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    environ: Mapping[str, str]
    """For processes that are to use it."""


@contextlib.contextmanager
def prefect_server() -> Iterator[Server]:
    """Run Prefect's server with its database in the project; on port 4200 if that is free.

    Raises:
        ServerError: it does not start.
    """
    port = free_port(4200)
    home = root() / ".prefect"
    home.mkdir(exist_ok=True)
    environ = own_environment() | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    start = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    with running(
        start, environ, home / "server.log", f"http://{HOST}:{port}/api/health"
    ) as process:
        yield Server(f"http://{HOST}:{port}", process, environ)


@contextlib.contextmanager
def mlflow_server() -> Iterator[Server]:
    """Run MLflow's UI on the project's own runs; on port 5000 if that is free.

    One worker and no job runner: the defaults start fourteen processes of 3 GB in all.

    Raises:
        ServerError: it does not start.
    """
    port = free_port(5000)
    environ = own_environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    start = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    start += ["--workers", "1", "--backend-store-uri", tracking_uri()]
    start += ["--default-artifact-root", (root() / "mlartifacts").as_uri()]
    with running(
        start, environ, root() / "mlflow.db.log", f"http://{HOST}:{port}/health"
    ) as process:
        yield Server(f"http://{HOST}:{port}", process, environ)


def own_environment() -> dict[str, str]:
    """Ours, with the commands of this Python's environment first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return os.environ | {"PATH": path, "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else any free one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return int(probe.getsockname()[1])
    raise ServerError(f"no free port on {HOST}")


@contextlib.contextmanager
def running(
    command: list[str], environ: Mapping[str, str], log: Path, health: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A server process in a group of its own, ready when `health` answers; stopped at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        _wait_until_healthy(process, health, log)
        yield process
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(health, timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.3)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise ServerError(f"the server did not start; the end of {log}:\n{last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_STOP), (signal.SIGKILL, SECONDS_TO_STOP)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return
