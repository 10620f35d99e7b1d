"""How far a stage is, told everywhere at once: terminal or log, MLflow's curves, Prefect's bar."""

import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from eagle3.progress import ConsoleReporter
from tasks.prefect_lazy import PREFECT_ON, artifact_key
from tasks.tracking import current_run

SECONDS_BETWEEN_UPDATES = 3.0


class StageReporter(ConsoleReporter):
    """The reporter that stages hand to the library."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage
        self._bars: dict[str, UUID] = {}
        self._last_update: dict[str, float] = {}

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """Say it on the console, and move the Prefect artifact every few seconds and at the end."""
        super().progress(label, done, total, unit)
        if not PREFECT_ON:
            return
        now = time.monotonic()
        if done < total and now - self._last_update.get(label, 0.0) < SECONDS_BETWEEN_UPDATES:
            return
        self._last_update[label] = now
        self._move_artifact(label, 100 * done / max(total, 1), f"{label}: {done} of {total} {unit}")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Say it on the console, and add the points to MLflow's curves."""
        super().metrics(values, step)
        run = current_run()
        if run is not None:
            run.log_metrics(values, step)

    def _move_artifact(self, label: str, percent: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if label in self._bars:
            update_progress_artifact(self._bars[label], percent, description=text)
            return
        key = artifact_key(f"progress-{self._stage}-{label}")
        made: Any = create_progress_artifact(percent, key=key, description=text)
        self._bars[label] = made
