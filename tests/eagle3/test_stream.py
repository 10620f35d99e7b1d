"""Training over states that are made while it reads them: the stored run's result, in less room."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from listeners import StopAt
from tiny_pipeline import Inputs, make_inputs, train
from watching import WatchingEngine, shards_on_disk

from eagle3.artifacts import Drafter, HiddenStates
from eagle3.config import Params
from eagle3.engines.base import RowStates
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import ArtifactError, DiskFullError, StoreError
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import load_rows
from eagle3.store.writer import StateWriter

SIZE = 128
STEPS = {"less than an epoch": 5, "three epochs": 24}
"""An epoch of the tiny corpus is about nine steps; the third is not whole."""


@dataclass(frozen=True)
class Trained:
    """What training leaves."""

    curve: str
    files: dict[str, bytes]


def trained() -> Trained:
    home = Drafter.home(SIZE)
    files = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*.safetensors")}
    return Trained(Drafter.curve_home(SIZE).read_text(), files)


def options(params: Params, keep: bool, steps: int, shard_tokens: int = 64) -> Params:
    extract = {"keep": keep, "ahead_shards": 1, "chunk_tokens": 16, "shard_tokens": shard_tokens}
    train_params = {"batch_tokens": 256, "total_steps": steps, "validate_every": 4}
    return params.model_copy(
        update={
            "extract": params.extract.model_copy(update=extract),
            "train": params.train.model_copy(update=train_params),
        }
    )


class Project:
    """Inputs of a streamed run in a folder, and the stored runs that they are compared with."""

    def __init__(self, folder: Path, params: Params) -> None:
        self.folder, self.params = folder, params
        self.stored: dict[str, Trained] = {}
        os.chdir(folder)
        inputs = make_inputs(options(params, True, 1), SIZE)
        for name, steps in STEPS.items():
            train(inputs, options(params, True, steps))
            self.stored[name] = trained()
            shutil.rmtree(Drafter.home(SIZE))
        shutil.rmtree(HiddenStates.home)
        engine = TransformersEngine(inputs.target, params.target)
        extract_hidden_states(
            inputs.target,
            inputs.corpus,
            options(params, False, 1).extract,
            engine,
            HiddenStates.home,
            ConsoleReporter(),
        )


@pytest.fixture(scope="module")
def made() -> dict[str, Project]:
    return {}


@pytest.fixture
def project(
    made: dict[str, Project],
    tiny_params: Params,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """The inputs of a streamed run, in a copy that is the current directory."""
    monkeypatch.chdir(tmp_path)
    if "project" not in made:
        made["project"] = Project(tmp_path_factory.mktemp("stream"), tiny_params)
    monkeypatch.chdir(shutil.copytree(made["project"].folder, tmp_path / "project"))
    return made["project"]


@pytest.mark.parametrize("steps", STEPS)
def test_a_streamed_run_gives_the_curve_and_the_weights_of_a_stored_one_and_leaves_no_states(
    project: Project, steps: str
) -> None:
    params = options(project.params, False, STEPS[steps])
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    train(inputs, params, engine=engine)

    assert trained() == project.stored[steps]
    # Each row is run once, also those that lie across shards.
    assert len(engine.rows) == len(set(engine.rows))
    lengths = [len(row) for row in engine.rows]
    assert max(lengths) > params.extract.shard_tokens, "no row is longer than a shard"
    # Nothing of the training split's states is left.
    assert list(Path(".work").iterdir()) == []
    assert [str(path) for path in Path.cwd().rglob("train.zarr")] == [
        str(Path.cwd() / "data" / "corpus" / "train.zarr")
    ]


def test_one_epoch_has_a_window_of_shards_on_disk_and_runs_only_what_it_reads(
    project: Project,
) -> None:
    params = options(project.params, False, STEPS["less than an epoch"], shard_tokens=64)
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    train(inputs, params, engine=engine)
    rows = load_rows(Path("data/corpus/train.zarr"))
    longest = max(rows.span(row).stop - rows.span(row).start for row in range(len(rows)))
    across = -(-longest // 64) + 1

    assert engine.most <= 1 + across < rows.num_tokens // 64
    assert len(engine.rows) < len(rows)


@pytest.mark.parametrize(("steps", "stop"), [("less than an epoch", 3), ("three epochs", 22)])
def test_a_stopped_run_goes_on_to_the_same_end(project: Project, steps: str, stop: int) -> None:
    params = options(project.params, False, STEPS[steps])
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    with pytest.raises(KeyboardInterrupt):
        train(inputs, params, StopAt(stop), engine=engine)
    before = len(engine.rows)
    train(inputs, params, engine=engine)

    assert trained() == project.stored[steps]
    assert len(engine.rows) - before < before


KILLED = """
import os, signal, sys
from eagle3.config import Params
from eagle3.engines.transformers import TransformersEngine
from eagle3.progress import ConsoleReporter
from tiny_pipeline import Inputs, train

class KilledAt(ConsoleReporter):
    def progress(self, label, done, total, unit):
        if label == "training" and done == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

params = Params.model_validate_json(open("params.json").read())
inputs = Inputs.load(128)
engine = TransformersEngine(inputs.target, params.target)
train(inputs, params, KilledAt(), engine=engine)
"""


def test_a_killed_run_makes_again_what_it_still_needs_and_has_the_same_result(
    project: Project,
) -> None:
    params = options(project.params, False, STEPS["three epochs"])
    Path("params.json").write_text(params.model_dump_json())
    tests = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    # The last state is that of step 20. By step 24, shards that steps 20 to 24 read are gone.
    killed = subprocess.run([sys.executable, "-c", KILLED, "24"], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    train(inputs, params, engine=engine)

    assert engine.rows
    assert trained() == project.stored["three epochs"]


def test_shards_that_nobody_needs_any_more_are_removed_when_a_run_goes_on(project: Project) -> None:
    params = options(project.params, False, STEPS["less than an epoch"])
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    with pytest.raises(KeyboardInterrupt):
        train(inputs, params, StopAt(2), engine=engine)
    (store,) = Path(".work").glob("train-*/train.zarr")
    # As a run leaves it that was killed after the reading of shard 0, before its deletion.
    assert "00000.json" not in shards_on_disk()
    shutil.copy(store / "shards" / shards_on_disk()[0], store / "shards" / "00000.json")
    engine.seen.clear()
    train(inputs, params, engine=engine)

    assert "00000.json" not in engine.seen
    assert trained() == project.stored["less than an epoch"]


def test_a_damaged_shard_is_deleted_and_the_next_run_makes_it_anew(project: Project) -> None:
    params = options(project.params, False, STEPS["three epochs"])
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)

    class Damages(ConsoleReporter):
        def progress(self, label: str, done: int, total: int, unit: str) -> None:
            if label == "training" and done == 10:
                for path in Path(".work").glob("train-*/train.zarr/last/c.*"):
                    # The read-ahead deletes shards meanwhile: none is made anew here.
                    with suppress(FileNotFoundError), path.open("r+b") as file:
                        file.write(b"\0" * os.fstat(file.fileno()).st_size)

    with pytest.raises(StoreError, match="it is deleted: run the same command again"):
        train(inputs, params, Damages(), engine=engine)
    for file in Path(".work").glob("train-*/train.zarr/last/c.*"):
        file.write_bytes(file.read_bytes()[:-1])
    train(inputs, params, engine=engine)

    assert trained() == project.stored["three epochs"]


def test_a_fault_of_the_target_ends_training_with_its_own_words(project: Project) -> None:
    params = options(project.params, False, STEPS["less than an epoch"])
    inputs = Inputs.load(SIZE)

    class Poisoned(WatchingEngine):
        def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
            found = super().states(rows)
            if len(self.rows) > 8:
                found[0].last_TH[0, 0] = torch.nan
            return found

    with pytest.raises(StoreError, match=r"of train .* not finite, .*: row .*; set target.dtype"):
        train(inputs, params, engine=Poisoned(inputs, params))
    assert list(Path(".work").glob("train-*/training/state.safetensors"))


def test_the_target_goes_on_while_a_shard_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = options(project.params, False, STEPS["less than an epoch"])
    inputs, asked = Inputs.load(SIZE), [threading.Event() for _ in range(2)]

    class Asked(WatchingEngine):
        def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
            if shard_under_way:
                asked[1].set()
            return super().states(rows)

    class Waiting(StateWriter):
        def write(self, shard: int, *given: Any) -> None:
            if not asked[0].is_set():
                asked[0].set()
                shard_under_way.append(shard)
                assert asked[1].wait(60), "the target waits for the disk"
            super().write(shard, *given)

    shard_under_way: list[int] = []
    monkeypatch.setattr("eagle3.stream.StateWriter", Waiting)
    train(inputs, params, engine=Asked(inputs, params))

    assert trained() == project.stored["less than an epoch"]


@pytest.mark.parametrize("full_at", [0, 3, 7])
def test_a_disk_that_gets_full_ends_training_which_goes_on_where_there_is_room(
    project: Project, full_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = options(project.params, False, STEPS["less than an epoch"])
    inputs, written = Inputs.load(SIZE), []

    class Full(StateWriter):
        def write(self, shard: int, *given: Any) -> None:
            written.append(shard)
            if len(written) > full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(shard, *given)

    with monkeypatch.context() as patch:
        patch.setattr("eagle3.stream.StateWriter", Full)
        # Training waits for that very shard, the target for training: neither may do so for ever.
        with pytest.raises(DiskFullError, match="hidden states"):
            train(inputs, params, engine=WatchingEngine(inputs, params))
    assert len(written) == full_at + 1
    train(inputs, params, engine=WatchingEngine(inputs, params))

    assert trained() == project.stored["less than an epoch"]


def test_states_of_another_engine_than_extracted_the_others_are_refused(project: Project) -> None:
    params = options(project.params, False, 4)
    inputs = Inputs.load(SIZE)
    other = WatchingEngine(inputs, params)
    other.name = "transformers 0.1, float32 on cuda"

    with pytest.raises(ArtifactError, match="run `dvc repro --force extract` on this machine"):
        train(inputs, params, engine=other)


def test_too_little_room_is_said_before_anything_is_made(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = options(project.params, False, STEPS["three epochs"])
    inputs = Inputs.load(SIZE)
    engine = WatchingEngine(inputs, params)
    usage = shutil.disk_usage(Path.cwd())._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(DiskFullError, match=r"lower extract.ahead_shards \(1\)"):
        train(inputs, params, engine=engine)
    assert engine.rows == []


def test_the_record_says_that_the_training_split_is_not_kept(project: Project) -> None:
    states = HiddenStates.load(HiddenStates.home)

    assert not states.keep
    assert set(states.tokens) == {"validation", "eval"}
    assert "store_tokens_train" not in states.figures
