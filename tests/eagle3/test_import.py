import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_folders import (
    DRAFTED,
    IDS,
    VOCAB,
    WIDTH,
    Parts,
    drafter,
    kept_ids,
    target_embedding,
    write_target,
)
from safetensors.torch import load_file, save_file

from eagle3.check import check_drafter
from eagle3.errors import CheckpointError
from eagle3.importer import import_drafter

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def assert_imported(source: Path, tmp_path: Path, target: Path | None) -> tuple[str, ...]:
    """Import, then ask for exactly the sound drafter that the source was made from."""
    changes = import_drafter(source, tmp_path / "out", target, None)

    assert check_drafter(tmp_path / "out", target) == ()
    sound, found = drafter(), load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == sound.tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in sound.tensors.items())
    assert json.loads((tmp_path / "out/config.json").read_text())[KEY] == IDS
    return changes


def absolute(parts: Parts) -> None:
    parts.tensors["d2t"] = kept_ids()


def absolute_of_int32(parts: Parts) -> None:
    parts.tensors["d2t"] = kept_ids().int()
    del parts.tensors["t2d"]


def other_names(parts: Parts) -> None:
    parts.tensors = {n.replace("midlayer.", "layers.0."): t for n, t in parts.tensors.items()}


def shuffled(parts: Parts) -> None:
    order = torch.randperm(DRAFTED, generator=torch.Generator().manual_seed(1))
    parts.tensors["lm_head.weight"] = parts.tensors["lm_head.weight"][order]
    parts.tensors["d2t"] = kept_ids()[order] - torch.arange(DRAFTED)


def nested_ids_of_outputs(parts: Parts) -> None:
    del parts.config[KEY]
    parts.config["eagle_config"][KEY] = [layer - 1 for layer in IDS]


def nested_ids(parts: Parts) -> None:
    del parts.config[KEY]


def embedding(parts: Parts) -> None:
    parts.tensors["embed_tokens.weight"] = target_embedding().half()


def no_t2d(parts: Parts) -> None:
    del parts.tensors["t2d"]


def no_d2t(parts: Parts) -> None:
    del parts.tensors["d2t"]


def old_config(parts: Parts) -> None:
    for key in ("rope_parameters", "rope_scaling", "target_hidden_size", "torch_dtype"):
        del parts.config[key]
    parts.config["tie_word_embeddings"] = True


def new_config(parts: Parts) -> None:
    for key in ("rope_theta", "rope_scaling"):
        del parts.config[key]


def float32(parts: Parts) -> None:
    parts.tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in parts.tensors.items()
    }


LAYOUTS = {
    "d2t as target ids": (absolute, "from target ids into offsets"),
    "d2t as target ids, alone and of int32": (absolute_of_int32, "built t2d from d2t"),
    "layers.0 names": (other_names, "renamed 10 tensors"),
    "d2t unsorted": (shuffled, "and the rows of lm_head with it"),
    "nested ids that count outputs": (nested_ids_of_outputs, r"[1, 3, 4] into [2, 4, 5]"),
    "nested ids": (nested_ids, "at the top level too"),
    "embedded embedding": (embedding, "it is the target's"),
    "no t2d": (no_t2d, "built t2d"),
    "no d2t": (no_d2t, "built d2t"),
    "config of old readers": (old_config, "wrote tie_word_embeddings, torch_dtype"),
    "config of new readers": (new_config, None),
    "float32": (float32, "to bfloat16"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_diagnosed_and_converted(
    layout: str, tmp_path: Path, target: Path
) -> None:
    change, note = LAYOUTS[layout]
    parts = drafter()
    change(parts)
    source = parts.write(tmp_path / "published")
    assert check_drafter(source, target) != ()

    changes = assert_imported(source, tmp_path, target)
    assert note is None or any(note in said for said in changes), changes


def test_layer_ids_that_start_at_one_count_outputs_also_without_the_target(tmp_path: Path) -> None:
    parts = drafter()
    nested_ids_of_outputs(parts)

    assert_imported(parts.write(tmp_path / "published"), tmp_path, None)


def test_layer_ids_given_by_hand_overrule_the_config(tmp_path: Path) -> None:
    source = drafter().write(tmp_path / "published")

    import_drafter(source, tmp_path / "out", None, (3, 4, 6))

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config[KEY] == config["eagle_config"][KEY] == [3, 4, 6]


def test_missing_layer_ids_are_the_engines_default_for_the_targets_depth(
    tmp_path: Path, target: Path
) -> None:
    parts = drafter()
    del parts.config[KEY], parts.config["eagle_config"]
    source = parts.write(tmp_path / "published")

    with pytest.raises(CheckpointError, match="name the target with --target"):
        import_drafter(source, tmp_path / "out", None, None)
    assert_imported(source, tmp_path, target)


@pytest.mark.parametrize("stored", ["d2t.npy", "d2t.pt", "vocab_mapping.pt"])
def test_maps_in_side_files_are_found(stored: str, tmp_path: Path, target: Path) -> None:
    parts = drafter()
    maps = {name: parts.tensors.pop(name) for name in ("d2t", "t2d")}
    source = parts.write(tmp_path / "published")
    if stored == "d2t.npy":
        np.save(source / "d2t.npy", maps["d2t"].numpy())
        np.save(source / "t2d.npy", maps["t2d"].numpy())
    else:
        torch.save(maps if stored.startswith("vocab") else maps["d2t"], source / stored)

    assert_imported(source, tmp_path, target)


def test_a_pickle_of_tensors_is_read(tmp_path: Path, target: Path) -> None:
    parts = drafter()
    source = parts.write(tmp_path / "published")
    (source / "model.safetensors").unlink()
    torch.save(parts.tensors, source / "pytorch_model.bin")

    assert_imported(source, tmp_path, target)


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (Path.touch, (Path("attacked"),))


def test_a_pickle_that_could_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = drafter().write(tmp_path / "published")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(), protocol=2))

    with pytest.raises(CheckpointError, match="ask its author for safetensors"):
        import_drafter(source, tmp_path / "out", None, None)
    assert not Path("attacked").exists()


def test_shards_are_joined(tmp_path: Path, target: Path) -> None:
    parts = drafter()
    source = parts.write(tmp_path / "published")
    (source / "model.safetensors").unlink()
    names = sorted(parts.tensors)
    for number, chosen in enumerate((names[:6], names[6:]), 1):
        shard = {name: parts.tensors[name] for name in chosen}
        save_file(shard, source / f"model-0000{number}-of-00002.safetensors")

    assert_imported(source, tmp_path, target)


def test_an_embedding_that_is_not_the_targets_is_refused(tmp_path: Path, target: Path) -> None:
    parts = drafter()
    parts.tensors["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH)

    with pytest.raises(CheckpointError, match="name its own target"):
        import_drafter(parts.write(tmp_path / "published"), tmp_path / "out", target, None)


def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path, target: Path) -> None:
    parts = drafter(VOCAB)
    parts.tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    del parts.config["draft_vocab_size"]

    changes = import_drafter(parts.write(tmp_path / "published"), tmp_path / "out", target, None)

    assert check_drafter(tmp_path / "out", target) == ()
    assert any("left out d2t and t2d" in change for change in changes)


def test_scaled_rope_is_kept_in_both_spellings(tmp_path: Path) -> None:
    parts = drafter()
    del parts.config["rope_parameters"]
    parts.config["rope_scaling"] = {"type": "linear", "factor": 4.0}

    import_drafter(parts.write(tmp_path / "published"), tmp_path / "out", None, None)

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert config["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 4.0,
        "rope_theta": 10000.0,
    }


@pytest.mark.parametrize(
    ("break_it", "fix"),
    [
        (lambda p: p.tensors.pop("fc.weight"), "fetch it again"),
        (lambda p: (p.tensors.pop("d2t"), p.tensors.pop("t2d")), "nobody can tell which"),
        (lambda p: p.tensors.update(d2t=torch.arange(DRAFTED) * -1), "fetch its own"),
        (lambda p: p.config.pop("num_attention_heads"), "write the drafter's there"),
        (lambda p: p.tensors.update({"strange.weight": torch.ones(2)}), "cannot be made a sound"),
        (lambda p: p.config.update(norm_before_fc=True), "norm_before_fc"),
        (lambda p: p.tensors["lm_head.weight"].zero_(), "is all zero"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    break_it: object, fix: str, tmp_path: Path
) -> None:
    parts = drafter()
    break_it(parts)

    with pytest.raises(CheckpointError, match=fix):
        import_drafter(parts.write(tmp_path / "published"), tmp_path / "out", None, None)
    assert not list(tmp_path.glob("*out*"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = drafter().write(tmp_path / "published")

    with pytest.raises(CheckpointError, match="import into another folder"):
        import_drafter(source, source, None, None)
