import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3.artifacts import Corpus, Drafter, DraftVocab, Evaluation
from eagle3.errors import ArtifactError
from eagle3.lineage import describe, sources


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def corpus(sha: str) -> Corpus:
    made = Corpus(
        made_from={"target": "t" * 64},
        tokens={"train": 7},
        supervised_tokens={"train": 3},
        rows={"train": 1},
        sha256={"train": sha},
        counts={"read": 1},
    )
    made.save(Corpus.home)
    return made


def vocab(source: Corpus) -> DraftVocab:
    made = DraftVocab(
        made_from={"corpus": source.fingerprint},
        size=128,
        draft_vocab=128,
        target_vocab=320,
        always_kept=3,
        sha256="s" * 64,
        coverage={"coverage_train": 0.9},
    )
    made.save(DraftVocab.home(128))
    return made


def drafter(source: DraftVocab) -> Drafter:
    made = Drafter(
        made_from={"vocab": source.fingerprint},
        size=128,
        draft_vocab=128,
        best_step=6,
        acceptance_length_validation=1.2,
        refused_rows=0,
        trainable_parameters=10,
        sha256="w" * 64,
        params={},
    )
    made.save(Drafter.home(128))
    return made


def test_the_chain_goes_back_through_what_lies_in_each_home():
    made = drafter(vocab(corpus("a")))

    chain = [(source.stage, source.state) for source in sources(made)]

    assert chain == [("vocab", "the same"), ("corpus", "the same"), ("target", "missing")]


def test_a_source_that_was_made_anew_since_is_called_another_and_ends_the_chain():
    made = drafter(vocab(corpus("a")))
    vocab(corpus("b"))

    chain = [(source.stage, source.state) for source in sources(made)]

    assert chain == [("vocab", "another")]


def test_sources_of_a_size_are_looked_for_in_that_sizes_home():
    evaluation = Evaluation(made_from={"train": "x" * 64}, size="full", draft_vocab=320, metrics={})

    (source,) = sources(evaluation)

    assert source.home == Drafter.home("full")


def test_a_folder_its_record_and_what_it_holds_are_one_answer():
    made = corpus("a")

    by_folder, by_file = describe(Corpus.home), describe(Corpus.home / "manifest.json")

    assert by_folder.kind == by_file.kind == "corpus"
    assert by_folder.fingerprint == made.fingerprint
    assert by_folder.holds["tokens"] == {"train": 7}
    assert "made_from" not in by_folder.holds


def test_a_drafter_from_elsewhere_is_described_by_its_config_and_tensors():
    folder = Path("theirs")
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4, "draft_vocab_size": 3}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.zeros(3, 4)}, folder / "model.safetensors")

    described = describe(folder)

    assert described.kind == "drafter without a record"
    assert described.holds == {**config, "tensors": {"lm_head.weight": "F32 [3, 4]"}}


def test_a_record_of_another_version_names_the_command_that_makes_it_anew():
    Path("old").mkdir()
    Path("old/manifest.json").write_text('{"made_from": {}, "colour": 1}')

    with pytest.raises(ArtifactError, match="dvc repro --force"):
        describe(Path("old"))


def test_anything_else_is_refused_with_what_could_be_named():
    with pytest.raises(ArtifactError, match="name a folder with one of"):
        describe(Path())
