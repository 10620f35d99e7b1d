"""What happened: one MLflow run per executed stage, honest about how it ended.

The only user of mlflow. Runs are written through `MlflowClient` and explicit run ids: MLflow's
"active run" is per thread, and a stage must find its run from wherever the library reports.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil

from tasks.errors import ServerError, Terminated

# Read by mlflow when it is imported: a dead server must not hang a stage (the defaults did, 200 s).
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

log = logging.getLogger(__name__)

EXPERIMENT = "eagle3"
PARENT_RUN = "EAGLE3_MLFLOW_PARENT"
"""Environment variable by which the pipeline makes a stage's run a child of its own."""

SECONDS_BETWEEN_FLUSHES = 2.0
MOST_IN_A_BATCH = 500

_current: ContextVar["StageRun | None"] = ContextVar("current stage run", default=None)


class StageRun:
    """An open MLflow run. Curves are buffered: 100,000 steps must not pay for a write each."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.id = run_id
        self._client = client
        self._waiting: list[Metric] = []
        self._last_flush = time.monotonic()
        self._last_step = 0

    def log_params(self, tree: Mapping[str, Any]) -> None:
        """Log a nested tree of values by dotted names."""
        params = [Param(name, str(value)) for name, value in flatten(tree).items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self.id, params=params[start : start + 100])

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Add points to curves; they appear within seconds."""
        now = int(time.time() * 1000)
        self._last_step = max(self._last_step, step)
        self._waiting += [Metric(name, float(value), now, step) for name, value in values.items()]
        late = time.monotonic() - self._last_flush > SECONDS_BETWEEN_FLUSHES
        if late or len(self._waiting) >= MOST_IN_A_BATCH:
            self.flush()

    def log_figures(self, values: Mapping[str, float]) -> None:
        """Log final figures; at the last step, whose point MLflow shows as the value."""
        self.log_metrics(values, self._last_step)

    def close(self, status: str) -> None:
        """Write what waits, and say how the run ended: FINISHED, FAILED or KILLED."""
        try:
            self.flush()
            self._client.set_terminated(self.id, status)
        except (MlflowException, OSError) as error:
            # A full disk or a lost server. The stage's own error matters more, and the next start
            # closes the run.
            log.warning("MLflow run %s stays open (%s): %s", self.id, status, _first_line(error))

    def flush(self) -> None:
        """Write the points that still wait."""
        for start in range(0, len(self._waiting), MOST_IN_A_BATCH):
            self._client.log_batch(self.id, self._waiting[start : start + MOST_IN_A_BATCH])
        self._waiting.clear()
        self._last_flush = time.monotonic()

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags, which replace those of the same name."""
        for name, value in tags.items():
            self._client.set_tag(self.id, name, value)

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file or folder with the run."""
        if path.is_dir():
            self._client.log_artifacts(self.id, str(path), folder or path.name)
        else:
            self._client.log_artifact(self.id, str(path), folder)


def current_run() -> StageRun | None:
    """The run of the stage that this process executes, if it is one."""
    return _current.get()


def root() -> Path:
    """The project's folder; under `dvc exp run --queue` the current one is a passing copy."""
    return Path(os.environ.get("DVC_ROOT") or Path.cwd()).resolve()


def tracking_uri() -> str:
    """Where runs go: MLFLOW_TRACKING_URI, or the project's own SQLite file."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root() / 'mlflow.db'}"


@functools.cache
def client() -> tuple[MlflowClient, str]:
    """A client, and the id of our experiment; both made on the first call.

    Raises:
        ServerError: the tracking server does not answer.
    """
    uri = tracking_uri()
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # Processes that create MLflow's schema together break the database for good.
    with (root() / "mlflow.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            made = MlflowClient(tracking_uri=uri)
            found = made.get_experiment_by_name(EXPERIMENT)
            if found is not None:
                return made, found.experiment_id
            place = (root() / "mlartifacts").as_uri() if uri.startswith("sqlite") else None
            return made, made.create_experiment(EXPERIMENT, artifact_location=place)
        except (MlflowException, OSError) as error:
            raise ServerError(
                f"MLflow at {uri} cannot be used ({_first_line(error)}); start it, mend "
                "MLFLOW_TRACKING_URI, or unset that to write to the project's own file"
            ) from error


@contextlib.contextmanager
def stage_run(name: str, tags: Mapping[str, str], *, watch_system: bool) -> Iterator[StageRun]:
    """Open the MLflow run of a stage; close it as FINISHED, FAILED or KILLED, whichever is true.

    `watch_system` samples CPU, memory, disk, network and GPU every ten seconds.
    """
    mlflow_client, experiment = client()
    close_stale_runs()
    parent = os.environ.get(PARENT_RUN)
    nesting = {"mlflow.parentRunId": parent} if parent else {}
    run_id = mlflow_client.create_run(
        experiment,
        run_name=name,
        tags={"stage": name, **tags, **nesting, **process_tags(), **git_tags()},
    ).info.run_id
    run = StageRun(mlflow_client, run_id)
    token = _current.set(run)
    status = "FAILED"
    try:
        with _system_metrics(run_id) if watch_system else contextlib.nullcontext():
            yield run
        run.flush()
        status = "FINISHED"
    except (Terminated, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        _current.reset(token)
        run.close(status)


@contextlib.contextmanager
def pipeline_run(prefect_run_id: str) -> Iterator[StageRun]:
    """Open the parent of all stage runs of one pipeline run; a retry opens the same one again."""
    mlflow_client, experiment = client()
    close_stale_runs()
    mine = f"tags.stage = 'pipeline' and tags.`prefect.flow_run_id` = '{prefect_run_id}'"
    found = mlflow_client.search_runs([experiment], mine, max_results=1)
    tags = {
        "stage": "pipeline",
        "prefect.flow_run_id": prefect_run_id,
        **process_tags(),
        **git_tags(),
    }
    if found:
        run = StageRun(mlflow_client, found[0].info.run_id)
        mlflow_client.update_run(run.id, status="RUNNING")
        run.tag(tags)
    else:
        run = StageRun(
            mlflow_client,
            mlflow_client.create_run(experiment, run_name="pipeline", tags=tags).info.run_id,
        )
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    finally:
        run.close(status)


def link_reused(parent: StageRun, stage: str, how: str) -> None:
    """Tag a pipeline's run with the older run that made a result which was not made again."""
    record = Path(f"runs/{stage}.json")
    if how != "Ran" and record.exists():
        made_by = json.loads(record.read_text())["mlflow_run_id"]
        parent.tag({f"reused.{stage.replace('@', '.')}": made_by})


def close_stale_runs() -> list[str]:
    """Mark runs KILLED whose process on this machine is no more; returns their ids."""
    mlflow_client, experiment = client()
    killed = []
    for run in mlflow_client.search_runs(
        [experiment], "attributes.status = 'RUNNING'", max_results=1000
    ):
        tags = run.data.tags
        if tags.get("process.host") == socket.gethostname() and not _is_alive(tags):
            mlflow_client.set_terminated(run.info.run_id, "KILLED")
            killed.append(run.info.run_id)
            log.info("marked a dead run of %s KILLED in MLflow", tags.get("stage"))
    return killed


def process_tags() -> dict[str, str]:
    """Identity of this process that no later one shares: host, boot, id and start time."""
    return {
        "process.host": socket.gethostname(),
        "process.boot_id": _boot_id(),
        "process.pid": str(os.getpid()),
        "process.started": f"{psutil.Process().create_time():.2f}",
    }


def git_tags() -> dict[str, str]:
    """The commit, and whether the tree differs from it (dvc.lock apart: the run writes it)."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!dvc.lock")
    return {"git.commit": commit or "none", "git.dirty": str(bool(changed)).lower()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give the leaves of a nested mapping dotted names; sequences of scalars are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                flat |= flatten({str(index): item}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


@contextlib.contextmanager
def _system_metrics(run_id: str) -> Iterator[None]:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, tracking_uri=tracking_uri())
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


def _is_alive(tags: Mapping[str, str]) -> bool:
    if tags.get("process.boot_id") != _boot_id():
        return False
    try:
        started = psutil.Process(int(tags["process.pid"])).create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return abs(started - float(tags["process.started"])) < 1.0


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"{psutil.boot_time():.0f}"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=root(), check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
