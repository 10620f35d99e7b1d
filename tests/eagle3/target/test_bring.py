import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.errors import ArtifactError, ParamsError, TargetError
from eagle3.target import bring_target, default_aux_layers, load_tokenizer, read_embedding

from .conftest import change_json

HOME = TargetModel.home
Refer = Callable[[], TargetModel]


def test_default_aux_layers_are_low_middle_and_high():
    assert default_aux_layers(61) == (2, 30, 58)
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(7) == (2, 3, 4)


@pytest.mark.parametrize("num_layers", [1, 4, 5, 6])
def test_a_target_too_shallow_for_three_states_names_the_ids(num_layers: int):
    ids = re.escape(str([2, num_layers // 2, num_layers - 3]))
    with pytest.raises(ParamsError, match=rf"target.aux_layers: default is {ids} .*7 layers or mo"):
        default_aux_layers(num_layers)


def test_a_copied_target_is_complete_without_its_source(
    plain: Path, tiny_target_params: TargetParams
):
    params = tiny_target_params.model_copy(update={"source": str(plain)})

    target = bring_target(params, HOME)
    shutil.rmtree(plain)

    assert TargetModel.load(HOME) == target
    assert target.weights_folder == "."
    assert (target.architecture, target.aux_layers) == ("LlamaForCausalLM", (2, 4, 5))
    assert read_embedding(target).shape == (320, 32)
    assert load_tokenizer(target).decode([2]) == "<|im_end|>"


def test_a_referenced_target_is_its_manifest_alone(plain: Path, refer: Refer):
    target = refer()

    assert [path.name for path in HOME.iterdir()] == ["manifest.json"]
    assert target.weights_folder == str(plain.resolve())
    assert read_embedding(target).shape == (320, 32)


def test_bringing_a_target_twice_gives_the_same_bytes(tiny_target_params: TargetParams):
    first = bring_target(tiny_target_params, HOME)
    before = {path.name: path.read_bytes() for path in HOME.iterdir()}

    second = bring_target(tiny_target_params, HOME)

    assert {path.name: path.read_bytes() for path in HOME.iterdir()} == before
    assert first.fingerprint == second.fingerprint
    assert list(Path(".work").iterdir()) == []


def test_a_copied_target_can_be_the_source_of_another(tiny_target_params: TargetParams):
    first = bring_target(tiny_target_params, HOME)

    changes = {"source": str(HOME)}
    second = bring_target(tiny_target_params.model_copy(update=changes), Path("other"))

    assert second.weights_sha256 == first.weights_sha256
    assert second.files_sha256 == first.files_sha256


def test_given_aux_layers_are_kept(tiny_target_params: TargetParams):
    params = tiny_target_params.model_copy(update={"aux_layers": (1, 4, 8)})

    assert bring_target(params, HOME).aux_layers == (1, 4, 8)


def test_another_shape_than_params_say_names_every_key_and_both_values(
    tiny_target_params: TargetParams,
):
    shape = tiny_target_params.shape.model_copy(update={"num_layers": 30, "vocab_size": 49152})
    params = tiny_target_params.model_copy(update={"shape": shape})

    wanted = r"num_layers is 30, but .* has 8; target.shape.vocab_size is 49152, but .* has 320; me"
    with pytest.raises(TargetError, match=wanted):
        bring_target(params, HOME)


def test_a_refused_target_leaves_the_one_before_untouched(tiny_target_params: TargetParams):
    target = bring_target(tiny_target_params, HOME)
    shape = tiny_target_params.shape.model_copy(update={"num_layers": 9})

    with pytest.raises(TargetError, match="mend the shape"):
        bring_target(tiny_target_params.model_copy(update={"shape": shape}), HOME)

    assert TargetModel.load(HOME) == target


def test_an_embedding_that_contradicts_the_config_is_refused(plain: Path, refer: Refer):
    change_json(plain / "config.json", vocab_size=321)

    with pytest.raises(TargetError, match=r"is \[320, 32\], but .* says vocab_size 321"):
        refer()


@pytest.mark.parametrize(
    "change", [{"final_logit_softcapping": 30.0}, {"model_type": "gemma2"}, {"logit_scale": 0.1}]
)
def test_a_target_whose_logits_are_more_than_norm_and_head_is_refused(
    change: dict[str, object], plain: Path, refer: Refer
):
    change_json(plain / "config.json", **change)

    with pytest.raises(TargetError, match=rf"has `{next(iter(change))}`: .*another model"):
        refer()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_refused_unless_params_trust_it(
    file: str, plain: Path, refer: Refer
):
    change_json(plain / file, auto_map={"AutoModelForCausalLM": "modeling.Model"})

    with pytest.raises(TargetError, match=rf"{file} .*set target.trust_remote_code: true and pin"):
        refer()


def test_trusted_code_that_changed_since_the_target_stage_is_not_run(
    plain: Path, tiny_target_params: TargetParams
):
    (plain / "modeling.py").write_text("raise SystemExit('the pinned code')\n")
    change_json(plain / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    changes = {"source": str(plain), "weights": "reference", "trust_remote_code": True}
    target = bring_target(tiny_target_params.model_copy(update=changes), HOME)
    load_tokenizer(target)

    (plain / "modeling.py").write_text("raise SystemExit('other code')\n")

    with pytest.raises(ArtifactError, match=r"changed since the target stage.*--force target"):
        load_tokenizer(target)


@pytest.mark.parametrize("weights", ["copy", "reference"])
def test_retrained_weights_of_the_same_shape_are_another_target(
    weights: str, plain: Path, tiny_target_params: TargetParams
):
    changes = {"source": str(plain), "weights": weights}
    params = tiny_target_params.model_copy(update=changes)
    before = bring_target(params, HOME)
    tensors = load_file(plain / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})

    after = bring_target(params, HOME)

    assert after.weights_sha256 != before.weights_sha256
    assert after.files_sha256 == before.files_sha256


def test_another_chat_template_is_another_target(plain: Path, refer: Refer):
    before = refer()
    (plain / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    after = refer()

    assert after.fingerprint != before.fingerprint
    assert after.weights_sha256 == before.weights_sha256


def test_a_weight_file_cut_short_is_named(plain: Path, refer: Refer):
    whole = (plain / "model.safetensors").read_bytes()
    (plain / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    with pytest.raises(TargetError, match=r"model.safetensors cannot be read .*fetch it again"):
        refer()


def test_a_referenced_folder_that_is_gone_names_the_manifest(plain: Path, refer: Refer):
    target = refer()
    shutil.rmtree(plain)

    with pytest.raises(ArtifactError, match=r"data/target/manifest.json points to .*force target"):
        load_tokenizer(target)


def test_a_config_that_is_not_json_is_named(plain: Path, refer: Refer):
    (plain / "config.json").write_text(json.dumps({"a": 1})[:-1])

    with pytest.raises(TargetError, match=r"config.json is not JSON .*fetch the model again"):
        refer()
