"""A corpus that is killed while it captures goes on, and ends with the states of a whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from eagle3.config import Params

PROGRAM = Path(__file__).parents[2] / "kill_capture.py"
# While the first store is begun, while its states are written, and two stores later.
TOUCHES = (3, 32, 100)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_killed_run_goes_on_to_the_states_and_rows_of_an_undisturbed_one(
    tiny_params: Params, tmp_path: Path
) -> None:
    raw = tiny_params.model_dump(mode="json")
    chats = Path(raw["corpus"]["sources"][0]["path"])
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:14]))
    raw["corpus"]["answers"] |= {"max_new_tokens": 4, "batch_size": 4}
    raw["extract"]["capture_answers"] = True
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(raw))))
    subprocess.run(
        [sys.executable, PROGRAM, folder, *map(str, TOUCHES)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    whole = folder / "whole"
    for touch in TOUCHES:
        for place in ("data/corpus", ".work"):
            assert files_of(folder / str(touch) / place) == files_of(whole / place)
    assert any(whole.glob(".work/captured-*/eval/*.zarr/shards/00000.json"))
