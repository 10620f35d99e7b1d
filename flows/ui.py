"""`make prefect` and `make mlflow`: the user interfaces, on this machine alone, until Ctrl-C."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

from eagle3.errors import Eagle3Error
from tasks import signals
from tasks.errors import ServerError, Terminated
from tasks.servers import mlflow_server, own_environment, prefect_server

SECONDS_TO_STOP = 30.0


def serve_prefect() -> None:
    """Serve the deployment, and a server for it unless PREFECT_API_URL already names one."""
    serve = [sys.executable, "-m", "flows.serve"]
    team_server = os.environ.get("PREFECT_API_URL")
    if team_server:
        _say(f"Prefect: serving eagle3-pipeline/local at {team_server}")
        _run_until_stopped(serve, own_environment())
        return
    with prefect_server() as server:
        _say(f"Prefect: {server.url} (deployment eagle3-pipeline/local; Ctrl-C stops both)")
        _run_until_stopped(serve, server.environ)


def serve_mlflow() -> None:
    """Serve MLflow's UI on the runs of this project, unless they go to a server that has one."""
    team_server = os.environ.get("MLFLOW_TRACKING_URI", "")
    if team_server.startswith("http"):
        _say(f"MLflow: {team_server}")
        return
    with mlflow_server() as server:
        _say(f"MLflow: {server.url} (experiment eagle3, tab Training runs; Ctrl-C stops it)")
        server.process.wait()


def _run_until_stopped(command: list[str], environ: Mapping[str, str]) -> None:
    """Run a command; when we are to stop, let it end the runs it has started before we go."""
    process = subprocess.Popen(command, env=dict(environ))
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(SECONDS_TO_STOP)
    if code:
        raise ServerError(
            f"{' '.join(command[1:])} ended with exit code {code}; its output is above"
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signals.raise_on_sigterm()
    interfaces = {"prefect": serve_prefect, "mlflow": serve_mlflow}
    if len(sys.argv) != 2 or sys.argv[1] not in interfaces:
        sys.stderr.write("usage: python -m flows.ui prefect|mlflow\n")
        sys.exit(2)
    try:
        with contextlib.suppress(KeyboardInterrupt, Terminated):
            interfaces[sys.argv[1]]()
    except Eagle3Error as error:
        sys.exit(f"error: {error}")
