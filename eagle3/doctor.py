"""Is this machine ready to run the pipeline? Each check says what it found and what mends it.

Prefect, MLflow and DVC are looked at from outside (their files, commands and addresses): this
package must also run where none of them is installed.
"""

import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

LOWEST_PYTHON = (3, 11)
LOCK_FILE = Path("requirements.lock")
LOW_DISK = 8 * 2**30
"""The demo keeps about 2 GiB of weights, states and training state; a copying cache doubles it."""
HTTP_TIMEOUT = 3.0  # seconds

State = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. A warning does not stop a run; a fault does."""

    check: str
    state: State
    found: str
    fix: str = ""


def examine(project: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Run every check on a project's folder, with these environment variables."""
    return [
        check_python(),
        *check_pins(project / LOCK_FILE),
        check_python_on_path(environment),
        check_disk(project),
        check_dvc_cache(project),
        check_mlflow(project, environment),
        check_prefect(environment),
    ]


def check_python() -> Finding:
    """The interpreter is new enough."""
    found = f"{sys.version.split()[0]}, {sys.executable}"
    if sys.version_info >= LOWEST_PYTHON:
        return Finding("python", "ok", found)
    lowest = ".".join(map(str, LOWEST_PYTHON))
    return Finding("python", "fault", found, f"install Python {lowest} or later, then `make setup`")


def check_pins(lock: Path) -> Iterator[Finding]:
    """The packages here are those of the lock file."""
    if not lock.exists():
        yield Finding("pins", "fault", f"no {lock}", "run `eagle3 doctor` in the project's folder")
        return
    pins = dict(_pins(lock.read_text()))
    wrong = [
        f"{name} {found or 'missing'} (pinned {pinned})"
        for name, pinned in pins.items()
        if (found := _installed(name)) != pinned
    ]
    if wrong:
        yield Finding("pins", "fault", "; ".join(wrong), "run `make setup`")
    else:
        yield Finding("pins", "ok", f"{len(pins)} packages as in {lock.name}")


def _pins(text: str) -> Iterator[tuple[str, str]]:
    for name, pinned, marker in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)[ \t]*(;?)", text):
        # A pin under a condition is for other machines, or other Pythons.
        if not marker:
            yield name, pinned


def _installed(name: str) -> str | None:
    try:
        # A local part (+cpu, +cu130) says which build it is, not which version.
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def check_python_on_path(environment: Mapping[str, str]) -> Finding:
    """`python`, which dvc.yaml runs, is the interpreter that has our packages."""
    found = shutil.which("python", path=environment.get("PATH", os.defpath))
    own = Path(sys.executable).parent
    if found and Path(found).parent == own:
        return Finding("PATH", "ok", f"python is {found}")
    return Finding(
        "PATH",
        "warning",
        f"python is {found or 'nowhere'}, not in {own}",
        f"before `dvc repro`: export PATH={own}:$PATH (make does so itself)",
    )


def check_disk(project: Path) -> Finding:
    """There is room for results."""
    free = shutil.disk_usage(project).free
    found = f"{free / 2**30:.1f} GiB free"
    if free >= LOW_DISK:
        return Finding("disk", "ok", found)
    return Finding("disk", "warning", found, "make room; `eagle3 clean` removes unusable work")


def check_dvc_cache(project: Path) -> Finding:
    """The cache links results in a way that is safe for this user."""
    if not (project / ".dvc").is_dir():
        return Finding("dvc cache", "fault", f"{project} is no DVC project", "run `dvc init`")
    if _installed("dvc") is None:
        return Finding("dvc cache", "fault", "dvc is not installed", "run `make setup`")
    command = [sys.executable, "-m", "dvc", "config", "cache.type"]
    quiet = os.environ | {"DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(
        command, cwd=project, env=quiet, capture_output=True, text=True, check=False
    )
    # dvc exits 251 for a key that is not set.
    kinds = done.stdout.strip() or "reflink,copy (dvc's default)"
    linked = [kind for kind in ("hardlink", "symlink") if kind in kinds]
    if linked and os.geteuid() == 0:
        return Finding(
            "dvc cache",
            "warning",
            f"cache.type {kinds}, as root: writing into a result would damage the cache",
            "run as another user, or `dvc config --local cache.type reflink,copy`",
        )
    return Finding("dvc cache", "ok", f"cache.type {kinds}")


def check_mlflow(project: Path, environment: Mapping[str, str]) -> Finding:
    """Runs can be written, and none of a dead process is still called running."""
    address = environment.get("MLFLOW_TRACKING_URI", "")
    if address.startswith(("http://", "https://")):
        fix = "start it with `make mlflow`, or unset MLFLOW_TRACKING_URI"
        return _check_server("mlflow", address.rstrip("/") + "/health", fix)
    path = Path(address.removeprefix("sqlite:///")) if address else project / "mlflow.db"
    if not path.exists():
        return Finding("mlflow", "ok", f"no {path.name} yet; the first stage makes it")
    try:
        running = _running_runs(path)
    except sqlite3.Error as error:
        fix = f"move {path} away; the next stage makes a new one"
        return Finding("mlflow", "fault", f"{path} cannot be read: {error}", fix)
    stale = [run for run, tags in running.items() if _is_dead(tags)]
    if stale:
        fix = "nothing to do: the next stage marks them KILLED"
        return Finding("mlflow", "warning", f"{len(stale)} run(s) of dead processes: {stale}", fix)
    return Finding("mlflow", "ok", f"{path.name}, {len(running)} run(s) running")


def _running_runs(path: Path) -> dict[str, dict[str, str]]:
    """Tags of every MLflow run that is marked RUNNING, by run id."""
    query = (
        "SELECT runs.run_uuid, tags.key, tags.value FROM runs "
        "LEFT JOIN tags ON tags.run_uuid = runs.run_uuid WHERE runs.status = 'RUNNING'"
    )
    runs: dict[str, dict[str, str]] = {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        for run, key, value in database.execute(query):
            runs.setdefault(run, {})[key] = value
    return runs


def _is_dead(tags: Mapping[str, str]) -> bool:
    # Tags of tasks/tracking.py. A run of another machine cannot be judged from here.
    if tags.get("process.host") != socket.gethostname() or "process.pid" not in tags:
        return False
    try:
        started = psutil.Process(int(tags["process.pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    # Process ids are reused; a start time along with them is not.
    return abs(started - float(tags["process.started"])) >= 1.0


def check_prefect(environment: Mapping[str, str]) -> Finding:
    """The Prefect server answers, where one is set."""
    address = environment.get("PREFECT_API_URL", "")
    if not address:
        return Finding("prefect", "ok", "PREFECT_API_URL is not set: stages run without Prefect")
    fix = "start it with `make prefect`, or unset PREFECT_API_URL"
    return _check_server("prefect", address.rstrip("/") + "/health", fix)


def _check_server(check: str, address: str, fix: str) -> Finding:
    try:
        with urllib.request.urlopen(address, timeout=HTTP_TIMEOUT) as answer:
            return Finding(check, "ok", f"{address} answers {answer.status}")
    except (OSError, ValueError) as error:
        return Finding(check, "fault", f"{address} does not answer: {error}", fix)
