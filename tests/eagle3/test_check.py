import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_folders import IDS, VOCAB, WIDTH, drafter, target_head, write_target
from drafter_mutations import (
    AGAINST_THE_TARGET,
    KEY,
    MUTATIONS,
    dropped,
    fresh_linear,
    fresh_normal,
    key,
    no_key,
)
from safetensors.torch import load_file, save_file

from eagle3.artifacts import TargetModel
from eagle3.check import check_drafter
from eagle3.errors import CheckpointError, TargetError
from eagle3.fault import Fault


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def named(faults: tuple[Fault, ...], where: str, what: str) -> list[Fault]:
    return [f for f in faults if where in f.where and re.search(what, f"{f.what}; {f.fix}")]


def test_a_sound_drafter_has_no_fault(tmp_path: Path, target: Path) -> None:
    folder = drafter().write(tmp_path / "drafter")

    assert check_drafter(folder, None) == ()
    assert check_drafter(folder, target) == ()


def test_a_sound_drafter_of_the_whole_vocabulary_has_no_maps(tmp_path: Path, target: Path) -> None:
    folder = drafter(VOCAB).write(tmp_path / "drafter")

    assert check_drafter(folder, target) == ()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_named(mutation: str, tmp_path: Path) -> None:
    change, where, what = MUTATIONS[mutation]
    parts = drafter()
    torch.manual_seed(0)
    change(parts)

    faults = check_drafter(parts.write(tmp_path / "drafter"), None)

    assert named(faults, where, what), faults
    assert all(fault.fix for fault in faults)


@pytest.mark.parametrize("mutation", AGAINST_THE_TARGET)
def test_a_mutation_is_named_beside_the_target(mutation: str, tmp_path: Path, target: Path) -> None:
    change, where, what = AGAINST_THE_TARGET[mutation]
    parts = drafter()
    torch.manual_seed(0)
    change(parts)

    assert named(check_drafter(parts.write(tmp_path / "drafter"), target), where, what)


@pytest.mark.parametrize("seed", range(20))
def test_a_fresh_head_is_called_random_whatever_its_seed(seed: int, tmp_path: Path) -> None:
    parts = drafter()
    torch.manual_seed(seed)
    make = (fresh_normal, fresh_linear, torch.rand_like)[seed % 3]
    parts.tensors["lm_head.weight"] = make(parts.tensors["lm_head.weight"])

    assert named(check_drafter(parts.write(tmp_path / "drafter"), None), "lm_head", "looks random")


def test_a_head_trained_from_scratch_on_another_basis_is_not_called_random(
    tmp_path: Path, target: Path
) -> None:
    parts = drafter()
    basis, _ = torch.linalg.qr(
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
    )
    parts.tensors["lm_head.weight"] = (parts.tensors["lm_head.weight"].float() @ basis).bfloat16()
    folder = parts.write(tmp_path / "drafter")

    assert check_drafter(folder, None) == ()
    assert check_drafter(folder, target) == ()


def test_a_random_targets_rows_are_told_from_a_random_head_by_the_target(
    tmp_path: Path, tiny_target: Path
) -> None:
    head = load_file(tiny_target / "model.safetensors")["lm_head.weight"]
    parts = drafter(VOCAB)
    parts.config |= {"vocab_size": len(head), "draft_vocab_size": len(head)}
    parts.tensors["lm_head.weight"] = head.bfloat16()
    folder = parts.write(tmp_path / "drafter")

    assert named(check_drafter(folder, None), "lm_head.weight", "pass --target")
    assert check_drafter(folder, tiny_target) == ()


def test_rows_that_the_target_repeats_may_repeat(tmp_path: Path, target: Path) -> None:
    unused = target_head()
    unused[90:] = unused[89]
    save_file({"lm_head.weight": unused}, target / "model.safetensors")
    parts = drafter(VOCAB)
    parts.tensors["lm_head.weight"] = unused.bfloat16()

    assert check_drafter(parts.write(tmp_path / "drafter"), target) == ()


def test_the_targets_own_record_settles_the_layer_ids(tmp_path: Path, target: Path) -> None:
    TargetModel(
        made_from={},
        source=str(target),
        revision="",
        weights_sha256="",
        files_sha256="",
        weights_folder=".",
        architecture="LlamaForCausalLM",
        num_layers=8,
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        tied=False,
        aux_layers=(2, 4, 6),
        trust_remote_code=False,
    ).save(target)

    faults = check_drafter(drafter().write(tmp_path / "drafter"), target)
    assert named(faults, KEY, r"\[2, 4, 5\], but .* extracted at \[2, 4, 6\]")


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    parts = drafter()
    for change in (dropped("norm.weight"), key("tie_word_embeddings", True), no_key(KEY)):
        change(parts)

    faults = check_drafter(parts.write(tmp_path / "drafter"), None)
    assert len(faults) == 3


def test_a_change_after_training_shows_by_our_record(tmp_path: Path) -> None:
    folder = drafter().write(tmp_path / "drafter")
    (folder / "eagle3.json").write_text(json.dumps({"sha256": "0" * 64}))

    assert named(check_drafter(folder, None), "model.safetensors", "changed after training")


def test_a_drafter_with_the_norms_of_eagle_3_1_is_sound_only_with_all_of_them(
    tmp_path: Path, target: Path
) -> None:
    parts = drafter(norms=True)
    assert check_drafter(parts.write(tmp_path / "whole"), target) == ()
    del parts.tensors["fc_norm.1.weight"]
    faults = check_drafter(parts.write(tmp_path / "part"), target)

    assert [(fault.where, fault.what) for fault in faults] == [
        ("model.safetensors: fc_norm.1.weight", "is missing: engines leave it at random, silently")
    ]


@pytest.mark.parametrize("trained", [True, False])
def test_our_record_says_whether_the_normed_state_is_fed_back(
    trained: bool, tmp_path: Path
) -> None:
    parts = drafter()
    parts.config["norm_output"] = not trained
    folder = parts.write(tmp_path / "drafter")
    assert check_drafter(folder, None) == ()

    (folder / "eagle3.json").write_text(
        json.dumps({"params": {"drafter": {"norm_output": trained}}})
    )
    fix = "write true: it was trained with it" if trained else "false: it was trained without"
    assert named(check_drafter(folder, None), "norm_output", fix)


def test_our_own_drafter_never_norms_before_the_residual(tmp_path: Path) -> None:
    parts = drafter()
    parts.config["norm_before_residual"] = True
    folder = parts.write(tmp_path / "drafter")
    assert check_drafter(folder, None) == ()

    (folder / "eagle3.json").write_text("{}")
    assert named(check_drafter(folder, None), "norm_before_residual", "it was trained without it")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("pytorch_model.bin", "is a pickle, which can run code"),
        ("model-00001-of-00001.safetensors", "the weights are in model-00001"),
        (None, "is missing"),
    ],
)
def test_weights_in_another_place_are_named(name: str | None, what: str, tmp_path: Path) -> None:
    folder = drafter().write(tmp_path / "drafter")
    moved = folder / "model.safetensors"
    moved.rename(folder / name) if name else moved.unlink()

    assert named(check_drafter(folder, None), "", what)


def test_maps_in_a_side_file_are_named(tmp_path: Path) -> None:
    parts = drafter()
    d2t = parts.tensors.pop("d2t")
    folder = parts.write(tmp_path / "drafter")
    np.save(folder / "d2t.npy", d2t.numpy())

    assert named(check_drafter(folder, None), "d2t", r"side file \(d2t.npy\)")


@pytest.mark.parametrize("keep", [4, 100, -3])
def test_a_weights_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    folder = drafter().write(tmp_path / "drafter")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])

    assert named(check_drafter(folder, None), "model.safetensors", "cannot be read")


def test_a_broken_config_does_not_hide_the_weights(tmp_path: Path) -> None:
    folder = drafter().write(tmp_path / "drafter")
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").unlink()

    faults = check_drafter(folder, None)
    assert named(faults, "config.json", "is not JSON")
    assert named(faults, "model.safetensors", "is missing")


def test_no_folder_is_an_error_and_not_a_fault(tmp_path: Path, target: Path) -> None:
    with pytest.raises(CheckpointError, match="name one that holds config"):
        check_drafter(tmp_path / "nothing", None)
    folder = drafter().write(tmp_path / "drafter")
    shutil.rmtree(target)
    with pytest.raises(TargetError, match="is no Hugging Face folder"):
        check_drafter(folder, target)


def test_ids_here_are_the_defaults_of_eight_layers() -> None:
    assert IDS == [2, 8 // 2, 8 - 3]
