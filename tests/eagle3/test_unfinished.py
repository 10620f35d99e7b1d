"""A killed writer leaves a file beside its own; the next writer of the same removes it."""

import os
import subprocess
import sys
from pathlib import Path

from eagle3.artifacts import write_atomically
from eagle3.unfinished import unfinished

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from eagle3.unfinished import unfinished
unfinished(Path(sys.argv[1])).write_text("{")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_writing(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, path], check=False)
    assert [left.suffix for left in tmp_path.iterdir()] == [".partial"]

    write_atomically(path, "{}")

    assert [left.name for left in tmp_path.iterdir()] == ["manifest.json"]
    assert path.read_text() == "{}"


def test_files_of_writers_that_run_and_of_other_names_stay(tmp_path: Path) -> None:
    path, other = tmp_path / "manifest.json", tmp_path / ".other.json.1.partial"
    writers = tmp_path / f".manifest.json.{os.getppid()}.partial"
    for stays in (other, writers):
        stays.write_text("")

    assert unfinished(path).name == f".manifest.json.{os.getpid()}.partial"

    assert other.exists()
    assert writers.exists()
