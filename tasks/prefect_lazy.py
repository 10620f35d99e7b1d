"""Prefect where PREFECT_API_URL names a server; plain functions, at no cost, where it does not.

Prefect without a server starts one per process, which takes 14-24 s per stage. So `dvc repro` on a
laptop never imports Prefect, and a run under a server loses nothing.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from uuid import UUID

from eagle3.errors import Eagle3Error
from tasks.errors import ServerError
from tasks.rank import HELPS

F = TypeVar("F", bound=Callable[..., Any])

PREFECT_ON = bool(os.environ.get("PREFECT_API_URL")) and not HELPS

PARENT_TASK_RUN = "EAGLE3_PREFECT_TASK_RUN_ID"
"""Environment variable by which the pipeline's task makes a stage's flow its subflow."""

if PREFECT_ON:
    # The library's own lines go to the run's log too. Prefect reads this when it is first imported.
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "eagle3,tasks")


def flow(name: str) -> Callable[[F], F]:
    """`@prefect.flow(name=...)`, or nothing without a server."""

    def decorate(function: F) -> F:
        if not PREFECT_ON:
            return function
        from prefect import flow as prefect_flow

        # Parameters are our own checked records: Prefect need not check them again.
        return prefect_flow(name=name, validate_parameters=False)(function)  # type: ignore[return-value]

    return decorate


def task(name: str, retries: int) -> Callable[[F], F]:
    """`@prefect.task` that never caches (DVC alone decides what is up to date), or nothing.

    A retry is for what passes by itself, such as a lost GPU or network; an `Eagle3Error` needs a
    person.
    """

    def decorate(function: F) -> F:
        if not PREFECT_ON:
            return function
        from prefect import task as prefect_task
        from prefect.cache_policies import NO_CACHE

        return prefect_task(  # type: ignore[return-value]
            name=name,
            retries=retries,
            retry_delay_seconds=10,
            retry_condition_fn=_may_pass_by_itself,
            cache_policy=NO_CACHE,
            persist_result=False,
        )(function)

    return decorate


class FlowRun:
    """One run of a stage's flow; its id is known before it starts, so that MLflow can name it."""

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._function = function
        self._arguments = dict(arguments)
        self._run = self._register() if PREFECT_ON else None

    @property
    def id(self) -> str:
        """Prefect's id of the run; empty without a server."""
        return str(self._run.id) if self._run else ""

    @property
    def parent(self) -> str:
        """Prefect's id of the pipeline's task that this run is nested under; empty without one."""
        return os.environ.get(PARENT_TASK_RUN, "") if PREFECT_ON else ""

    def __call__(self) -> Any:
        """Run the flow and return what it returns."""
        if self._run is None:
            return self._function(**self._arguments)
        from prefect.flow_engine import run_flow

        return run_flow(self._function, flow_run=self._run, parameters=self._arguments)  # type: ignore[arg-type]

    def _register(self) -> Any:
        import httpx
        from prefect.client.orchestration import get_client
        from prefect.states import Pending

        quieten_known_errors()
        try:
            with get_client(sync_client=True) as client:
                return client.create_flow_run(
                    self._function,  # type: ignore[arg-type]
                    name=self._name,
                    parameters=self._arguments,
                    parent_task_run_id=UUID(self.parent) if self.parent else None,
                    state=Pending(),
                )
        except (httpx.TransportError, RuntimeError) as error:
            url = os.environ["PREFECT_API_URL"]
            raise ServerError(
                f"PREFECT_API_URL is {url}, but no Prefect server answers there ({error}); start "
                "one with `make prefect`, or unset PREFECT_API_URL to run without"
            ) from error


def quieten_known_errors() -> None:
    """Log an `Eagle3Error` by its message alone: its traceback says nothing that a user can use."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _WithoutKnownTracebacks) for known in logger.filters):
            logger.addFilter(_WithoutKnownTracebacks())


def publish_markdown(key: str, text: str) -> None:
    """Show a text among the artifacts of the current Prefect run."""
    if PREFECT_ON:
        from prefect.artifacts import create_markdown_artifact

        create_markdown_artifact(markdown=text, key=artifact_key(key))


def artifact_key(text: str) -> str:
    """Spell a name as Prefect's artifact keys allow: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class _WithoutKnownTracebacks(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Eagle3Error):
            record.exc_info = None
        return True


def _may_pass_by_itself(_task: Any, _run: Any, state: Any) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, Exception) and not isinstance(error, Eagle3Error)
