"""A project folder of its own for each test, with MLflow's schema already made."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import tracking


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without an experiment; making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow: Path) -> Iterator[Path]:
    for name in ("MLFLOW_TRACKING_URI", "DVC_ROOT", "DVC_STAGE", tracking.PARENT_RUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_mlflow, tmp_path / "mlflow.db")
    subprocess.run(["git", "init", "-q"], check=True)
    tracking.client.cache_clear()
    yield tmp_path
    tracking.client.cache_clear()
