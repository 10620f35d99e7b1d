"""One server for the stages of a project, with a small stand-in for vLLM's server module."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_stand_in import SERVER, child_of, is_gone, runs, write_vllm

from eagle3.artifacts import TargetModel, write_atomically
from eagle3.config import Params
from eagle3.engines.client import HttpClient
from eagle3.engines.keep_running import start_shared, stop_shared
from eagle3.engines.server import PYTHON_VARIABLE
from eagle3.engines.shared import (
    LOCK,
    LOG,
    RECORD,
    SHARED,
    SharedServer,
    Wanted,
    find_shared,
    is_held,
    running,
)
from eagle3.engines.vllm import URL_VARIABLE, VllmEngine
from eagle3.errors import EngineError
from eagle3.target import bring_target

START = """
import sys
from pathlib import Path
from eagle3.artifacts import TargetModel, write_atomically
from eagle3.config import Params
from eagle3.engines.keep_running import start_shared

params = Params.model_validate_json(Path("params.json").read_text())
start_shared(TargetModel.load(TargetModel.home), params)
"""
NEVER_READY = "import time; print('child 0', flush=True); time.sleep(600)"


@pytest.fixture
def target(
    tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TargetModel]:
    """A project with a target, and a vLLM; whatever server it has is stopped at the end."""
    monkeypatch.chdir(tmp_path)
    write_vllm(tmp_path, SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *map(str, sys.path)]))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    Path("params.json").write_text(tiny_params.model_dump_json())
    yield bring_target(tiny_params.target, TargetModel.home)
    stop_shared()


def starting() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", START], stderr=subprocess.DEVNULL)


def start() -> None:
    """Start the server, as a process that then ends."""
    with starting() as process:
        assert process.wait() == 0


def wanted(target: TargetModel, params: Params) -> Wanted:
    return Wanted.of(target, params.target.dtype, params.corpus.longest_text)


def test_a_server_outlives_its_start_is_used_by_stages_and_ends_when_told(target, tiny_params):
    start()
    child = child_of(SHARED / LOG)
    server = running()
    assert server is not None
    assert server.url.startswith("http://127.0.0.1:")
    assert HttpClient(server.url).is_healthy()
    with VllmEngine(target, tiny_params.target, 64, Path("stage.log")) as engine:
        assert engine.name == "vllm 0, float32"
    # The stage has neither started one nor stopped that one.
    assert not Path("stage.log").exists()
    assert runs(child)
    assert start_shared(target, tiny_params) == server

    assert stop_shared()
    assert is_gone(server.pid)
    assert is_gone(child)
    assert not (SHARED / RECORD).exists()
    assert find_shared(wanted(target, tiny_params)) is None
    assert not stop_shared()


def test_a_server_that_does_not_fit_is_refused_and_every_difference_named(target, tiny_params):
    fits = wanted(target, tiny_params)
    record = SharedServer(pid=os.getpid(), url="http://127.0.0.1:1", is_for=fits)
    write_atomically(SHARED / RECORD, record.model_dump_json())
    with (SHARED / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shorter = replace(fits, max_length=fits.max_length - 1)
        assert find_shared(shorter) == find_shared(fits) == record
        other = Wanted("other", "bfloat16", (1, 2, 3, 4), fits.max_length + 1, "other")
        with pytest.raises(EngineError, match="eagle3 engine stop") as refused:
            find_shared(other)

    said = str(refused.value)
    for part in ("another target", "other code", "float32, not bfloat16", "(1, 2, 3, 4)", "room"):
        assert part in said


def test_no_server_is_left_by_a_start_that_is_killed(target):
    write_vllm(Path(), NEVER_READY)
    with starting() as process:
        while not (SHARED / LOG).exists() or "child" not in (SHARED / LOG).read_text():
            time.sleep(0.02)
        with pytest.raises(EngineError, match="wait until `eagle3 engine start` has ended"):
            running()
        process.kill()
    deadline = time.monotonic() + 10
    while is_held(SHARED / LOCK) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert running() is None


def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing(target, tiny_params):
    write_vllm(Path(), "raise SystemExit('no such model: somewhere')")

    with pytest.raises(
        EngineError, match=r"(?s)status 1 .*vllm\.log ends:.*no such model: somewhere"
    ):
        start_shared(target, tiny_params)
    assert running() is None


def test_the_record_of_a_server_that_was_killed_is_not_believed(target, tiny_params):
    start()
    server = running()
    assert server is not None
    os.killpg(server.pid, signal.SIGKILL)
    assert is_gone(server.pid)
    assert is_gone(child_of(SHARED / LOG))

    assert (SHARED / RECORD).exists()
    assert find_shared(wanted(target, tiny_params)) is None
    start()
    assert running() != server


def test_a_server_whose_leader_was_killed_is_still_found_and_ended(target):
    start()
    server = running()
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    assert is_gone(server.pid)

    assert running() == server
    assert stop_shared()
    assert is_gone(child_of(SHARED / LOG))
    assert not HttpClient(server.url).is_healthy()
