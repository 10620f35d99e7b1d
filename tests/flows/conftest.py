"""A real Prefect server, and a DVC project of a few trivial stages for the pipeline to run."""

import contextlib
import functools
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml
from chain_project import ROOT, Chain, make_chain, plain_environment, scale_down
from filelock import FileLock

from tasks.servers import Server, prefect_server

DVC_YAML = """\
stages:
  first:
    cmd: echo one > first.txt
    outs: [first.txt]
  second:
    matrix:
      size: ${sizes}
    cmd: python second.py ${item.size}
    deps: [first.txt]
    params: [rate]
    outs:
      - second-${item.size}.txt
  last:
    cmd: cat second-1.txt second-full.txt > last.txt
    deps: [second-1.txt, second-full.txt]
    outs: [last.txt]
"""
SECOND_PY = """\
import pathlib, sys, yaml
rate = yaml.safe_load(open("params.yaml"))["rate"]
if rate < 0:
    sys.exit(f"error: rate is {rate}; give a positive one")
pathlib.Path(f"second-{sys.argv[1]}.txt").write_text(f"{rate}\\n")
"""


def call(api: str, path: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{api}/{path}", data, headers)
    for _ in range(20):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            time.sleep(0.5)  # SQLite was busy; Prefect's own client waits and asks again, too
    raise AssertionError(f"{api}/{path}: still unavailable")


class Deployment:
    """The served deployment, reached as the UI does: through the server's API."""

    def __init__(self, project: Path, api: str) -> None:
        self.project = project
        self.api = api

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return call(self.api, path, body)

    def id(self) -> str | None:
        found = self.call("deployments/filter", {"deployments": {"name": {"any_": ["local"]}}})
        return found[0]["id"] if found else None

    def start(self) -> str:
        body = {"state": {"type": "SCHEDULED"}}
        return self.call(f"deployments/{self.id()}/create_flow_run", body)["id"]

    def retry(self, run: str) -> None:
        state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        self.call(f"flow_runs/{run}/set_state", {"state": state, "force": False})

    def wait_for(self, run: str, *types: str) -> dict[str, Any]:
        """Wait until the run is in a state of one of the types; returns the state."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            state = self.call(f"flow_runs/{run}")["state"]
            if state["type"] in types:
                return state
            time.sleep(0.5)
        raise AssertionError(f"still {state['name']}, not one of {types}")

    def task_states(self, run: str) -> list[tuple[str, str]]:
        """(task, state name) of a run, in the order of their starts."""
        body = {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_ASC"}
        tasks = self.call("task_runs/filter", body)
        tasks.sort(key=lambda task: task["start_time"] or "")
        return [(task["name"], task["state_name"]) for task in tasks]

    def log_until(self, run: str, last: str) -> list[str]:
        """Lines of a run's log; the server gets them in batches, some after the run has ended."""
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            messages = [line["message"] for line in self.call("logs/filter", wanted)]
            if last in messages:
                return messages
            time.sleep(0.5)
        raise AssertionError(f"{last!r} is not in the log: {messages}")

    def set_rate(self, rate: int) -> None:
        text = f"sizes: [1, full]\nrate: {rate}\n"
        (self.project / "params.yaml").write_text(text)


def make_project(folder: Path) -> None:
    (folder / "dvc.yaml").write_text(DVC_YAML)
    (folder / "second.py").write_text(SECOND_PY)
    run = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(["git", "init", "-q"], **run)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], **run)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_ROOT", str(tmp_path_factory.mktemp("prefect")))
        with contextlib.ExitStack() as stack:
            # One at a time among the processes that share the tests: all want the same port.
            with FileLock(tmp_path_factory.getbasetemp().parent / "prefect-server.lock"):
                server = stack.enter_context(prefect_server())
            yield server


@pytest.fixture(scope="session")
def deployment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """eagle3-pipeline/local, served over the trivial project."""
    project = tmp_path_factory.mktemp("served")
    make_project(project)
    environ = {**server.environ}
    environ.pop("DVC_ROOT", None)
    deployment = Deployment(project, f"{server.url}/api")
    deployment.set_rate(1)
    with (project / "deployment.log").open("wb") as log:
        serving = subprocess.Popen(
            [sys.executable, "-m", "flows.deployment"],
            cwd=project,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 90
        while deployment.id() is None:
            assert serving.poll() is None, (project / "deployment.log").read_text()
            assert time.monotonic() < deadline, (project / "deployment.log").read_text()
            time.sleep(0.5)
        yield deployment
    finally:
        serving.terminate()
        serving.wait(30)


@pytest.fixture(scope="session")
def first_run(deployment: Deployment) -> str:
    """A run over the trivial project, which has never run before."""
    run = deployment.start()
    deployment.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    return run


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Chain:
    """The shipped dvc.yaml, code and settings over the tiny target; nothing has run yet."""
    params = scale_down(yaml.safe_load((ROOT / "params.yaml").read_text()), tiny_target)
    return make_chain(tmp_path_factory.mktemp("chain"), params, plain_environment())


@pytest.fixture(scope="session")
def prefect_api(server: Server) -> Callable[[str, dict[str, Any]], Any]:
    """Posts a question to the server's API."""
    return functools.partial(call, f"{server.url}/api")


@pytest.fixture(scope="session")
def chain_run(chain: Chain, server: Server, prefect_api: Callable[..., Any]) -> str:
    """Prefect's id of a run of the whole pipeline over the tiny project."""
    output = chain.run("python", "-m", "flows.pipeline", environ=dict(server.environ)).stderr
    found = re.search(r"/runs/flow-run/([0-9a-f-]{36})", output)
    assert found, output
    return found[1]


@pytest.fixture(scope="session")
def second_size(chain: Chain, chain_run: str) -> list[str]:
    """The stages that `dvc repro` runs, without Prefect, when a size was added after that run."""
    chain.change("vocab", sizes=[288, "full"])
    return chain.repro()
