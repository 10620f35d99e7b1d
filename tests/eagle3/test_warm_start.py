"""Training that goes on from a published drafter: what it takes over, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.artifacts import Corpus, Drafter, DraftVocab, TargetModel
from eagle3.checkpoint import load_drafter
from eagle3.config import Params, VocabParams
from eagle3.errors import CheckpointError, VocabError
from eagle3.maps import load_maps
from eagle3.target import read_head
from eagle3.vocab import select_vocab

SIZE = 128
PUBLISHED = "published"
WEIGHTS = f"{PUBLISHED}/model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("warm")}


@pytest.fixture
def inputs(
    made: dict[str, Any], tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Inputs:
    """Inputs of training beside a drafter that somebody trained on them and published."""
    if "inputs" not in made:
        monkeypatch.chdir(made["folder"])
        made["inputs"] = make_inputs(tiny_params, SIZE)
        train(made["inputs"], tiny_params)
        Path(PUBLISHED).mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(Drafter.home(SIZE) / name, PUBLISHED)
    monkeypatch.chdir(shutil.copytree(made["folder"], tmp_path / "project"))
    found = made["inputs"]
    assert isinstance(found, Inputs)
    return found


def warm(params: Params, **changes: object) -> Params:
    update = {"init_from": PUBLISHED, **changes}
    return params.model_copy(update={"train": params.train.model_copy(update=update)})


def set_config(**changes: object) -> None:
    path = Path(PUBLISHED) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def draft_the_last_tokens() -> torch.Tensor:
    """Give the published drafter maps that no count of this corpus would; returns their ids."""
    tensors = load_file(WEIGHTS)
    t2d_V = torch.zeros_like(tensors["t2d"])
    t2d_V[-SIZE:] = True
    ids_D = t2d_V.nonzero().flatten()
    save_file({**tensors, "t2d": t2d_V, "d2t": ids_D - torch.arange(SIZE)}, WEIGHTS)
    return ids_D


def choose(inputs: Inputs, params: VocabParams, size: int) -> DraftVocab:
    home = DraftVocab.home(size)
    return select_vocab(inputs.target, inputs.corpus, params, size, PUBLISHED, home)


def test_training_starts_from_the_published_weights(inputs: Inputs, tiny_params: Params) -> None:
    # One step that moves nothing: what is kept is what it started from.
    record = train(inputs, warm(tiny_params, learning_rate=1e-12, total_steps=2))
    published, _ = load_drafter(Path(PUBLISHED))
    kept, _ = load_drafter(Drafter.home(SIZE))

    for name, tensor in published.state_dict().items():
        assert torch.equal(kept.state_dict()[name], tensor), name
    assert record.made_from["init_from"]


def test_a_head_of_its_own_cannot_be_frozen(inputs: Inputs, tiny_params: Params) -> None:
    tensors = load_file(WEIGHTS)
    save_file({**tensors, "lm_head.weight": 2 * tensors["lm_head.weight"]}, WEIGHTS)
    with pytest.raises(CheckpointError, match=r"has a head of its own.*set train\.head to trained"):
        train(inputs, warm(tiny_params, head="frozen"))


def test_a_published_head_that_is_the_targets_can_be_frozen(
    inputs: Inputs, tiny_params: Params
) -> None:
    tensors = load_file(WEIGHTS)
    rows_DH = read_head(inputs.target)[load_maps(inputs.vocab).ids_D].bfloat16()
    save_file({**tensors, "lm_head.weight": rows_DH}, WEIGHTS)
    train(inputs, warm(tiny_params, head="frozen", total_steps=2))
    kept, _ = load_drafter(Drafter.home(SIZE))

    assert torch.equal(kept.lm_head.weight, rows_DH.float())


def test_another_checkpoint_is_another_run(inputs: Inputs, tiny_params: Params) -> None:
    params = warm(tiny_params, total_steps=2)
    first = train(inputs, params)
    tensors = load_file(WEIGHTS)
    tensors["fc.weight"] *= 2
    save_file(tensors, WEIGHTS)
    second = train(inputs, params)

    assert first.made_from["init_from"] != second.made_from["init_from"]
    assert first.sha256 != second.sha256


def test_the_draft_vocabulary_is_the_published_one(inputs: Inputs, tiny_params: Params) -> None:
    ids_D = draft_the_last_tokens()
    params = tiny_params.vocab.model_copy(update={"keep_special": False})

    vocab = choose(inputs, params, SIZE)

    assert torch.equal(load_maps(vocab).ids_D, ids_D)
    assert vocab.coverage["coverage_train"] < inputs.vocab.coverage["coverage_train"]


def test_another_size_is_refused_and_the_right_one_named(
    inputs: Inputs, tiny_params: Params
) -> None:
    with pytest.raises(VocabError, match=r"vocab\.sizes has 64, .* drafts 128 of 320.*\[128\]"):
        choose(inputs, tiny_params.vocab, 64)


def test_a_token_to_keep_that_the_checkpoint_lacks_is_refused(
    inputs: Inputs, tiny_params: Params
) -> None:
    t2d_V = load_file(WEIGHTS)["t2d"]
    lost = (~t2d_V).nonzero().flatten().tolist()
    words = json.loads((TargetModel.home / "tokenizer.json").read_text())["model"]["vocab"]
    token = next(word for word, number in words.items() if number in lost)
    params = tiny_params.vocab.model_copy(update={"keep_tokens": (token,)})

    with pytest.raises(VocabError, match=r"cannot draft 1 of the tokens to keep"):
        choose(inputs, params, SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 96}, r"set drafter\.intermediate_size to 96"),
        ({"rope_theta": 5.0}, r"set drafter\.rope_theta to 5\.0"),
        ({"norm_before_residual": True}, r"norm_before_residual is True, this run trains False"),
        ({"fc_norm": True}, r"trains False; set drafter\.fc_norm to True"),
        ({"norm_output": True}, r"trains False; set drafter\.norm_output to True"),
        ({"norm_before_fc": True}, r"norm_before_fc is set, which we do not train"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            r"set target\.aux_layers to \[1, 3, 4\]",
        ),
    ],
)
def test_another_network_is_refused_and_the_difference_named(
    inputs: Inputs, tiny_params: Params, change: dict[str, Any], message: str
) -> None:
    set_config(**change)
    with pytest.raises(CheckpointError, match=message):
        train(inputs, warm(tiny_params))


def test_a_checkpoint_with_other_maps_than_the_vocab_stage_is_refused(
    inputs: Inputs, tiny_params: Params
) -> None:
    draft_the_last_tokens()
    with pytest.raises(CheckpointError, match="other tokens than the vocab stage chose"):
        train(inputs, warm(tiny_params))


def test_a_folder_without_a_drafter_is_refused(inputs: Inputs, tiny_params: Params) -> None:
    shutil.rmtree(PUBLISHED)
    with pytest.raises(CheckpointError, match=r"published/model\.safetensors .* does not exist"):
        train(inputs, warm(tiny_params))
    with pytest.raises(VocabError, match="is no drafter in the plain format"):
        choose(inputs, tiny_params.vocab, SIZE)
    assert Corpus.load(Corpus.home) == inputs.corpus
