"""Stages asked of real DVC, one at a time, and what is left when somebody is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks import dvc_stage
from tasks.errors import StageFailed

DVC_YAML = """\
stages:
  b:
    cmd: python b.py
    deps: [a.txt, b.py]
    params: [rate]
    outs: [b.txt]
    metrics: [b.json]
  a:
    cmd: echo a > a.txt
    outs: [a.txt]
  slow:
    cmd: exec python slow.py
    outs: [slow.txt]
"""
B_PY = "open('b.txt', 'w').write('b'); open('b.json', 'w').write('{}')"
SLOW_PY = """\
import os, pathlib, time
from tasks.signals import die_with_parent
die_with_parent()
pathlib.Path("slow.pid.partial").write_text(str(os.getpid()))
pathlib.Path("slow.pid.partial").replace("slow.pid")
time.sleep(120)
"""
CALL = """\
from tasks import dvc_stage, signals
signals.raise_on_sigterm()
dvc_stage.reproduce("slow", dvc_stage.environment("", ""), print, force=False)
"""

# dvc asks pygtrie in a way that pygtrie will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    for name, text in (("dvc.yaml", DVC_YAML), ("b.py", B_PY), ("slow.py", SLOW_PY)):
        Path(name).write_text(text)
    Path("params.yaml").write_text("rate: 1\n")
    return tmp_path


def reproduce(stage: str) -> tuple[str, list[str]]:
    lines: list[str] = []
    how = dvc_stage.reproduce(stage, dvc_stage.environment("", ""), lines.append, force=False)
    return how, lines


def wait_until(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_stages_come_after_what_they_need(project):
    names = [stage.name for stage in dvc_stage.stages()]
    assert names.index("a") < names.index("b")
    assert {stage.name: stage.needs for stage in dvc_stage.stages()} == {
        "a": (),
        "b": ("a",),
        "slow": (),
    }


def test_a_stage_says_whether_it_ran_or_was_unchanged_or_restored(project):
    assert reproduce("a")[0] == "Ran"
    assert reproduce("b")[0] == "Ran"
    assert reproduce("b")[0] == "Unchanged"
    Path("params.yaml").write_text("rate: 2\n")
    assert reproduce("b")[0] == "Ran"
    Path("params.yaml").write_text("rate: 1\n")
    assert reproduce("b")[0] == "Restored"


def test_a_failed_stage_gives_its_own_reason(project):
    reproduce("a")
    Path("b.py").write_text("import sys; sys.exit('error: b.txt cannot be; mend b.py')")
    with pytest.raises(StageFailed, match=r"b\.txt cannot be; mend b\.py"):
        reproduce("b")
    Path("b.py").write_text("1 / 0")
    with pytest.raises(StageFailed, match="ZeroDivisionError: division by zero"):
        reproduce("b")


def test_the_lineage_of_a_stage_is_what_dvc_lock_will_say(project):
    reproduce("a")
    lineage = dvc_stage.lineage("b")
    assert lineage.params == ("rate",)
    inputs = lineage.input_tags()
    assert list(inputs) == ["dvc.in.a.txt", "dvc.in.b.py"]

    reproduce("b")
    lock = Path("dvc.lock").read_text()
    for tag in [*inputs.values(), *lineage.output_tags().values()]:
        assert tag in lock
    assert list(lineage.output_tags()) == ["dvc.out.b.txt"]


def test_outside_a_dvc_project_there_is_no_lineage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dvc_stage.lineage("train@full") == dvc_stage.Lineage()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["cancel", "kill -9"])
def test_when_the_pipeline_dies_so_does_the_stage(project, number, shell, monkeypatch):
    monkeypatch.setenv("SHELL", shell)
    caller = subprocess.Popen([sys.executable, "-c", CALL], stderr=subprocess.DEVNULL)
    assert wait_until(Path("slow.pid").exists)
    stage = psutil.Process(int(Path("slow.pid").read_text()))

    os.kill(caller.pid, number)

    caller.wait()
    assert wait_until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE)
