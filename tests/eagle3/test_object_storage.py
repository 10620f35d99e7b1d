"""The stages with their states in a bucket: the drafter of the disk, and work found again there."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from listeners import Listener
from s3_server import KEY, SECRET, TestBucket, files_of, s3_server
from tiny_corpus import save_corpus
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.artifacts import Drafter, HiddenStates, Split, TargetModel
from eagle3.config import Params, TargetParams
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.target import bring_target

# 3, 1 and 1 shards of 16 tokens; row 2 of train ends shard 0.
LENGTHS: dict[Split, list[int]] = {"train": [5, 9, 6, 20], "validation": [16], "eval": [7, 4]}


@pytest.fixture(scope="module")
def bucket() -> Iterator[TestBucket]:
    with s3_server():
        yield TestBucket()


def with_store(params: Params, store: str | None, keep: bool = True) -> Params:
    extract = params.extract.model_copy(update={"store": store, "keep": keep})
    return params.model_copy(update={"extract": extract})


def run(folder: Path, params: Params, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """Target, corpus, extract, vocab and train in a folder of their own."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    inputs = make_inputs(params, "full")
    train(inputs, params)
    return inputs


def test_the_drafter_and_all_records_are_those_of_the_disk_and_credentials_are_nowhere(
    bucket: TestBucket, tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = run(tmp_path / "disk", tiny_params, monkeypatch)
    params = with_store(tiny_params, "s3://states/tiny")
    in_bucket = run(tmp_path / "bucket", params, monkeypatch)

    # Its weights, its record with what it was made from, its training state.
    drafter = Drafter.home("full")
    assert files_of(tmp_path / "bucket" / drafter) == files_of(tmp_path / "disk" / drafter)
    assert in_bucket == on_disk
    # What DVC versions of the states: three pointers and the record.
    assert sorted(files_of(tmp_path / "bucket" / HiddenStates.home)) == [
        "eval.zarr/remote.json",
        "manifest.json",
        "train.zarr/remote.json",
        "validation.zarr/remote.json",
    ]
    kept = [*files_of(tmp_path).values(), *bucket.content("tiny").values()]
    for credential in (KEY, SECRET):
        assert not any(credential.encode() in content for content in kept)


def test_a_streamed_run_has_its_window_on_the_disk_and_the_held_out_splits_in_the_bucket(
    bucket: TestBucket, tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "disk", tiny_params, monkeypatch)
    params = with_store(tiny_params, "s3://states/streamed", keep=False)
    (tmp_path / "streamed").mkdir()
    monkeypatch.chdir(tmp_path / "streamed")
    inputs = make_inputs(params, "full")
    engine = OnDisk(TransformersEngine(inputs.target, params.target))
    train(inputs, params, engine=engine)

    drafter = Drafter.home("full")
    for name in ("model.safetensors", "training/state.safetensors"):
        one, other = tmp_path / "streamed" / drafter / name, tmp_path / "disk" / drafter / name
        assert one.read_bytes() == other.read_bytes()
    stores = {name.partition("-")[0] for name in bucket.content("streamed")}
    assert stores == {"validation", "eval"}
    assert engine.shards, "shards were on the disk"
    assert list(Path(".work").iterdir()) == []


class OnDisk:
    """The real engine, which looks at the shards on the disk whenever it is called."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.name, self.engine = engine.name, engine
        self.shards: set[str] = set()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("training generates nothing")

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        markers = Path(".work").glob("train-*/train.zarr/shards/*.json")
        self.shards.update(path.name for path in markers)
        return self.engine.states(rows)


class Counting:
    """The real engine, until a row of a length comes up that it is told to stop at."""

    def __init__(self, engine: TransformersEngine, stop_at: int = -1) -> None:
        self.name, self.engine, self.stop_at = engine.name, engine, stop_at
        self.rows: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("extraction generates nothing")

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        if self.stop_at in map(len, rows):
            raise KeyboardInterrupt
        self.rows += map(len, rows)
        return self.engine.states(rows)


def test_shards_of_a_killed_run_are_found_again_and_those_of_a_finished_one_if_undamaged(
    bucket: TestBucket,
    tiny_params: Params,
    tiny_target_params: TargetParams,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = bring_target(tiny_target_params, TargetModel.home)
    corpus, engine = save_corpus(target, LENGTHS), TransformersEngine(target, tiny_target_params)
    small = tiny_params.extract.model_copy(update={"chunk_tokens": 4, "shard_tokens": 16})
    params = small.model_copy(update={"store": "s3://states/again"})

    def extract(stop_at: int = -1) -> list[int]:
        """Lengths of the rows that the target was run over."""
        counting = Counting(engine, stop_at)
        extract_hidden_states(target, corpus, params, counting, HiddenStates.home, Listener())
        return counting.rows

    with pytest.raises(KeyboardInterrupt):
        extract(stop_at=20)
    assert extract() == [6, 20, 16, 7, 4], "shard 0 was there"
    whole = bucket.content("again")

    [damaged] = [f"again/{name}" for name in whole if name.endswith("/last/c.2.0.0")]
    bucket.flip(damaged)
    # As `dvc repro --force extract` does, which is what the error of a damaged shard names.
    shutil.rmtree(HiddenStates.home)
    assert extract() == [20]
    assert bucket.content("again") == whole
