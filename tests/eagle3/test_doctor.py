import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from eagle3.doctor import (
    check_dvc_cache,
    check_mlflow,
    check_pins,
    check_prefect,
    check_python_on_path,
)


def test_pins_that_are_installed_are_fine_whatever_their_build(tmp_path: Path):
    lock = tmp_path / "requirements.lock"
    torch_version = version("torch").partition("+")[0]
    lock.write_text(
        f"# made by pip-compile\ntorch=={torch_version}\n    # via eagle3\n"
        f"numpy=={version('numpy')}\nmissing==1.0 ; python_version < '3'\n"
    )

    (finding,) = check_pins(lock)

    assert (finding.state, finding.found) == ("ok", "2 packages as in requirements.lock")


def test_packages_that_differ_from_their_pins_are_named_with_both_versions(tmp_path: Path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("numpy==0.1\nno-such-package==2.0\n")

    (finding,) = check_pins(lock)

    assert finding.state == "fault"
    assert f"numpy {version('numpy')} (pinned 0.1)" in finding.found
    assert "no-such-package missing (pinned 2.0)" in finding.found
    assert finding.fix == "run `make setup`"


def test_another_python_first_on_the_path_is_named_with_the_line_that_mends_it(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)

    finding = check_python_on_path({"PATH": str(tmp_path)})

    assert finding.state == "warning"
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in finding.fix
    assert check_python_on_path({"PATH": str(Path(sys.executable).parent)}).state == "ok"


def mlflow_database(path: Path, tags: dict[str, str]) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, status TEXT)")
        database.execute("CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT)")
        database.execute("INSERT INTO runs VALUES ('one', 'RUNNING'), ('two', 'FINISHED')")
        for key, value in tags.items():
            database.execute("INSERT INTO tags VALUES (?, ?, 'one')", (key, value))
    return path


def process_tags(started: float) -> dict[str, str]:
    return {
        "process.host": os.uname().nodename,
        "process.pid": str(os.getpid()),
        "process.started": f"{started:.2f}",
    }


def test_a_running_run_of_a_living_process_is_fine(tmp_path: Path):
    mlflow_database(tmp_path / "mlflow.db", process_tags(psutil.Process().create_time()))

    finding = check_mlflow(tmp_path, {})

    assert (finding.state, finding.found) == ("ok", "mlflow.db, 1 run(s) running")


def test_a_running_run_whose_process_is_another_by_now_is_stale(tmp_path: Path):
    path = mlflow_database(tmp_path / "mlflow.db", process_tags(started=1.0))

    finding = check_mlflow(tmp_path, {"MLFLOW_TRACKING_URI": f"sqlite:///{path}"})

    assert finding.state == "warning"
    assert "['one']" in finding.found


def test_a_damaged_mlflow_database_is_a_fault(tmp_path: Path):
    (tmp_path / "mlflow.db").write_text("no database")

    finding = check_mlflow(tmp_path, {})

    assert finding.state == "fault"
    assert "move" in finding.fix


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server that answers 200 on /api/health alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_prefect_is_asked_for_its_health_where_it_is_set(server: str):
    assert check_prefect({}).state == "ok"
    assert check_prefect({"PREFECT_API_URL": f"{server}/api/"}).state == "ok"

    wrong = check_prefect({"PREFECT_API_URL": f"{server}/elsewhere"})

    assert (wrong.state, wrong.fix) == (
        "fault",
        "start it with `make prefect`, or unset PREFECT_API_URL",
    )


def dvc_project(folder: Path, cache_type: str) -> Path:
    quiet = os.environ | {"DVC_NO_ANALYTICS": "1"}
    for arguments in (["init", "--no-scm", "-q"], ["config", "cache.type", cache_type]):
        subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=folder, env=quiet, check=True)
    return folder


def test_hardlinks_are_warned_of_where_root_could_write_through_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project = dvc_project(tmp_path, "reflink,hardlink,copy")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    as_root = check_dvc_cache(project)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    as_user = check_dvc_cache(project)

    assert as_root.state == "warning"
    assert "cache.type reflink,copy" in as_root.fix
    assert (as_user.state, as_user.found) == ("ok", "cache.type reflink,hardlink,copy")


def test_a_folder_that_is_no_dvc_project_is_a_fault(tmp_path: Path):
    assert check_dvc_cache(tmp_path).fix == "run `dvc init`"
