"""DVC's stages as Prefect tasks, and DVC's knowledge of them. The only caller of dvc.

DVC is the only cache: each task asks it, and it answers "didn't change" in under a second.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import StageFailed
from tasks.prefect_lazy import PARENT_TASK_RUN
from tasks.signals import die_with_parent
from tasks.tracking import PARENT_RUN

if TYPE_CHECKING:
    from dvc.repo import Repo

os.environ.setdefault("DVC_NO_ANALYTICS", "1")

SECONDS_TO_STOP = 30.0
REASON = re.compile(r"error: |[\w.]*(Error|Exception): ", re.IGNORECASE)
"""A line by which a stage says why it ends: our own, or the last one of a traceback."""
ADVICE = (
    "To track the changes",
    "git add ",
    "To enable auto staging",
    "core.autostage",
    "`dvc push`",
    "Data and pipelines are up to date",
)
"""Of lines by which dvc advises people at a terminal; in a run's log they are noise."""
BUSY = ("Unable to acquire lock", "it is being blocked by")
"""What dvc says when another dvc command holds what it needs; waiting helps."""


@dataclass(frozen=True)
class DvcStage:
    """A stage of dvc.yaml, matrix expanded."""

    name: str
    needs: tuple[str, ...]
    """Names of the stages whose results it reads."""


@dataclass(frozen=True)
class Lineage:
    """What DVC knows of a stage that runs now; nothing of a stage that no dvc.yaml here has."""

    params: tuple[str, ...] | None = None
    """Keys of params.yaml that it is made from."""
    _inputs: tuple[Any, ...] = field(default=(), repr=False)
    _outputs: tuple[Any, ...] = field(default=(), repr=False)

    def input_tags(self) -> dict[str, str]:
        """DVC's hash of each file and folder that the stage reads, its own code included."""
        return {f"dvc.in.{item.def_path}": str(item.get_hash().value) for item in self._inputs}

    def output_tags(self) -> dict[str, str]:
        """DVC's hash of each result, as dvc.lock will have it."""
        results = [item for item in self._outputs if not item.metric]
        return {f"dvc.out.{item.def_path}": str(item.get_hash().value) for item in results}


def stages() -> list[DvcStage]:
    """All stages of dvc.yaml in an order in which each finds its inputs made."""
    with _repo() as repo:
        graph = repo.index.graph  # its edges point from a stage to what it needs
        needs = {
            stage.addressing: tuple(sorted(need.addressing for need in graph.successors(stage)))
            for stage in repo.index.stages
        }
    return [DvcStage(name, needs[name]) for name in TopologicalSorter(needs).static_order()]


def lineage(name: str) -> Lineage:
    """What DVC knows of the stage `name`."""
    from dvc.dependency.param import ParamsDependency

    if not Path("dvc.yaml").exists() or not Path(".dvc").exists():
        return Lineage()
    with _repo() as repo:
        found = [stage for stage in repo.index.stages if stage.addressing == name]
        if not found:
            return Lineage()
        stage = found[0]
        params = [
            key for item in stage.deps if isinstance(item, ParamsDependency) for key in item.params
        ]
        inputs = tuple(item for item in stage.deps if not isinstance(item, ParamsDependency))
        return Lineage(tuple(params), inputs, tuple(stage.outs))


def command(stage: str, *, force: bool) -> list[str]:
    """The command that brings one stage up to date.

    `--single-item`, since plain `dvc repro STAGE` locks the results of all stages before it.
    """
    options = ["--force"] if force else []
    return [sys.executable, "-m", "dvc", "repro", "--single-item", *options, stage]


def environment(task_run: str, mlflow_parent: str) -> dict[str, str]:
    """The environment of a stage's process: ours, less what Prefect's runner added for itself."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT__")}
    own_python = str(Path(sys.executable).parent)  # `python` in dvc.yaml must be this one
    return inherited | {
        "PATH": os.pathsep.join([own_python, inherited.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        # What the stage's own flow logs goes to its own run; here it would come twice.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        PARENT_TASK_RUN: task_run,
        PARENT_RUN: mlflow_parent,
    }


def reproduce(
    stage: str, environ: dict[str, str], say: Callable[[str], None], *, force: bool
) -> str:
    """Bring one stage up to date, its output passed to `say` line by line.

    Returns:
        How: `Ran`, `Unchanged`, or `Restored` from DVC's run cache.

    Raises:
        StageFailed: the stage failed; the message has the stage's own reason.
    """
    how = "Ran"
    reasons: list[str] = []
    with _process_group(command(stage, force=force), environ) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.rstrip()
            if not line or any(text in line for text in ADVICE):
                continue
            say(line)
            if "didn't change, skipping" in line:
                how = "Unchanged"
            elif "is cached - skipping run" in line:
                how = "Restored"
            if REASON.match(line) or any(text in line for text in BUSY):
                reasons.append(line)
        code = process.wait()
    if code:
        raise StageFailed(_reason(stage, code, reasons))
    return how


def as_prefect_task() -> Any:
    """`reproduce` as a Prefect task whose state is named Ran, Unchanged or Restored.

    Made on demand: importing Prefect takes seconds, and stage processes import this module too.
    """
    from prefect import get_run_logger, task
    from prefect.cache_policies import NO_CACHE
    from prefect.runtime import task_run
    from prefect.states import Completed

    @task(
        name="dvc-stage",
        task_run_name="{stage}",
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=3,
        retry_delay_seconds=10,
        retry_condition_fn=_is_busy,
    )
    def dvc_stage(stage: str, mlflow_parent: str, force: bool) -> Any:
        """Bring one DVC stage up to date in its own process group."""
        environ = environment(str(task_run.id), mlflow_parent)
        how = reproduce(stage, environ, get_run_logger().info, force=force)
        return Completed(name=how, message=f"{stage}: {how.lower()}")

    return dvc_stage


@contextlib.contextmanager
def _process_group(
    arguments: list[str], environ: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own; whatever ends the block early ends the whole group."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        bufsize=1,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _repo() -> "Iterator[Repo]":
    from dvc.repo import Repo

    with Repo() as repo:
        yield repo


def _reason(stage: str, code: int, reasons: list[str]) -> str:
    if code < 0:
        return f"stage {stage} was ended by {signal.Signals(-code).name} from outside"
    # The stage's own last word; dvc's "failed to reproduce" after it says nothing more.
    own = [line for line in reasons if "failed to reproduce" not in line]
    said = own[-1] if own else "; ".join(reasons) or "it said nothing; see the log above"
    return f"stage {stage} failed (dvc exit code {code}): {said.removeprefix('error: ')}"


def _is_busy(_task: Any, _run: Any, state: Any) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and any(text in str(error) for text in BUSY)
