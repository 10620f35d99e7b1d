import json
from pathlib import Path

import pytest
from drafter_folders import IDS, VOCAB, WIDTH, drafter, write_target
from safetensors.torch import load_file

from eagle3.check import check_drafter
from eagle3.errors import CheckpointError
from eagle3.export import export_drafter
from eagle3.importer import import_drafter


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return drafter().write(tmp_path / "drafter")


@pytest.mark.parametrize("drafted", [40, VOCAB])
@pytest.mark.parametrize("to", ["plain", "speculators"])
def test_what_is_exported_passes_the_check(
    to: str, drafted: int, tmp_path: Path, target: Path
) -> None:
    folder = drafter(drafted).write(tmp_path / "drafter")

    export_drafter(folder, tmp_path / "out", to, target, draft_tokens=3)

    assert check_drafter(tmp_path / "out", target) == ()
    assert ("d2t" in load_file(tmp_path / "out/model.safetensors")) == (drafted < VOCAB)


def test_the_plain_export_holds_what_engines_read_and_the_record(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "training").mkdir()
    (folder / "training/state.safetensors").write_bytes(b"")

    export_drafter(folder, tmp_path / "out", "plain", None, draft_tokens=3)

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    exported = (tmp_path / "out/model.safetensors").read_bytes()
    assert exported == (folder / "model.safetensors").read_bytes()


def test_the_speculators_config_says_all_that_its_readers_take_from_it(
    folder: Path, tmp_path: Path, target: Path
) -> None:
    export_drafter(folder, tmp_path / "out", "speculators", target, draft_tokens=5)

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 40
    assert config["eagle_aux_hidden_state_layer_ids"] == IDS
    outer = config["speculators_config"]
    assert outer["algorithm"] == "eagle3"
    assert outer["proposal_methods"][0]["speculative_tokens"] == 5
    assert outer["proposal_methods"][0]["proposal_type"] == outer["default_proposal_method"]
    assert outer["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    layer = config["transformer_layer_config"]
    assert (layer["hidden_size"], layer["vocab_size"], layer["num_hidden_layers"]) == (
        WIDTH,
        VOCAB,
        1,
    )
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"]


def test_the_speculators_tensors_have_that_formats_names_and_no_embedding(
    folder: Path, tmp_path: Path, target: Path
) -> None:
    export_drafter(folder, tmp_path / "out", "speculators", target, draft_tokens=3)

    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if "midlayer" in name or "embed_tokens" in name]


def test_plain_to_speculators_and_back_is_the_same_drafter(
    folder: Path, tmp_path: Path, target: Path
) -> None:
    export_drafter(folder, tmp_path / "out", "speculators", target, draft_tokens=3)
    import_drafter(tmp_path / "out", tmp_path / "back", target, None)

    assert json.loads((tmp_path / "back/config.json").read_text()) == drafter().config
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_the_norms_of_eagle_3_1_survive_the_way_to_speculators_and_back(
    tmp_path: Path, target: Path
) -> None:
    parts = drafter(norms=True)
    export_drafter(parts.write(tmp_path / "in"), tmp_path / "out", "speculators", target, 3)
    exported = json.loads((tmp_path / "out/config.json").read_text())
    import_drafter(tmp_path / "out", tmp_path / "back", target, None)

    # vLLM reads both at the top level, and nowhere else in this format.
    assert exported["fc_norm"] is exported["norm_output"] is True
    assert check_drafter(tmp_path / "out", target) == ()
    assert json.loads((tmp_path / "back/config.json").read_text()) == parts.config
    assert load_file(tmp_path / "back/model.safetensors").keys() == parts.tensors.keys()


def test_a_speculators_folder_without_the_norm_flag_is_a_fault(
    folder: Path, tmp_path: Path, target: Path
) -> None:
    export_drafter(folder, tmp_path / "out", "speculators", target, draft_tokens=3)
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"], config["speculators_config"]["verifier"]
    del config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    path.write_text(json.dumps(config))

    where = [fault.where for fault in check_drafter(tmp_path / "out", None)]
    assert where == [
        "config.json: norm_before_residual",
        "config.json: speculators_config.proposal_methods",
        "config.json: speculators_config.verifier",
    ]


def test_a_drafter_that_breaks_the_contract_is_not_exported(tmp_path: Path) -> None:
    parts = drafter()
    parts.config["tie_word_embeddings"] = True
    folder = parts.write(tmp_path / "drafter")

    with pytest.raises(CheckpointError, match=r"`eagle3 check .*drafter` names them all"):
        export_drafter(folder, tmp_path / "out", "plain", None, draft_tokens=3)
    assert not (tmp_path / "out").exists()


def test_the_speculators_format_needs_a_target(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="add --target DIR"):
        export_drafter(folder, tmp_path / "out", "speculators", None, draft_tokens=3)
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="write elsewhere with --out"):
        export_drafter(folder, folder, "plain", None, draft_tokens=3)
