from pathlib import Path

import pytest

from eagle3.artifacts import Corpus, TargetModel
from eagle3.captured.place import captured_folder
from eagle3.config import Params, TargetParams, check_params
from eagle3.leftovers import work_folders
from eagle3.target import bring_target
from eagle3.work import NOTE, publish, workspace


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def corpus(sha: str) -> Corpus:
    made = Corpus(
        made_from={},
        tokens={"train": 1},
        supervised_tokens={"train": 1},
        rows={"train": 1},
        sha256={"train": sha},
        counts={},
    )
    made.save(Corpus.home)
    return made


def reasons(params: Params) -> list[str]:
    return [folder.unusable for folder in work_folders(params)]


def with_value(params: Params, section: str, key: str, value: object) -> Params:
    raw = params.model_dump(mode="json")
    raw[section][key] = value
    return check_params(raw, "changed")


def test_work_on_the_params_and_inputs_at_hand_is_kept(tiny_params: Params):
    made_of = {"corpus": corpus("a").fingerprint, "train": tiny_params.train.model_dump()}
    workspace("train@128", made_of)

    assert reasons(tiny_params) == [""]


def test_work_on_other_params_is_named_with_the_section(tiny_params: Params):
    workspace("train@128", {"train": tiny_params.train.model_dump()})
    workspace("extract", {"params": tiny_params.extract.model_dump()})

    changed = with_value(tiny_params, "train", "seed", 7)

    assert reasons(changed) == ["", "params.yaml has other values in train"]


def test_captured_states_are_kept_until_they_would_be_stored_in_another_dtype(
    tiny_params: Params, tiny_target_params: TargetParams
):
    target = bring_target(tiny_target_params, TargetModel.home)
    captured_folder(target, "an engine", tiny_params.extract)

    assert reasons(tiny_params) == [""]
    changed = with_value(tiny_params, "extract", "state_dtype", "float32")
    assert reasons(changed) == ["params.yaml has other values in extract"]


def test_work_on_another_corpus_is_unusable(tiny_params: Params):
    workspace("extract", {"corpus": corpus("a").fingerprint})
    corpus("b")

    assert reasons(tiny_params) == ["it was made from another corpus"]


def test_work_on_inputs_that_dvc_may_bring_back_is_kept(tiny_params: Params):
    workspace("extract", {"corpus": "f" * 64})

    assert reasons(tiny_params) == [""]


def test_work_on_a_size_that_is_no_longer_asked_for_is_unusable(tiny_params: Params):
    workspace("train@64", {"train": tiny_params.train.model_dump()})

    assert reasons(tiny_params) == ["vocab.sizes has no 64"]


def test_a_folder_without_a_note_is_unusable(tiny_params: Params):
    Path(".work/train-0123").mkdir(parents=True)

    assert reasons(tiny_params) == [f"it has no readable {NOTE}"]


def test_no_work_folder_is_no_work(tiny_params: Params):
    assert work_folders(tiny_params) == []


def test_a_published_result_has_no_note_in_it():
    work = workspace("extract", {"params": {}})
    (work / "data").write_text("1")

    publish(work, Path("result"))

    assert [path.name for path in Path("result").iterdir()] == ["data"]
