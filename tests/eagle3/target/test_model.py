from pathlib import Path

import pytest
import torch

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.target import (
    bring_target,
    load_model,
    load_tokenizer,
    read_final_norm,
    read_head,
    target_logits,
)

TOKENS_NT = torch.tensor([[1, 40, 80, 120, 2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_head_alone_give_the_models_own_logits(
    dtype: str, tiny_target_params: TargetParams
):
    params = tiny_target_params.model_copy(update={"dtype": dtype})
    target = bring_target(params, TargetModel.home)
    model = load_model(target, params)
    caught = []
    model.model.norm.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    logits_NTV = model(TOKENS_NT).logits

    norm_H, eps = read_final_norm(target)
    head_VH = read_head(target).to(model.dtype)
    logits_TV = target_logits(caught[0][0], norm_H.to(model.dtype), eps, head_VH)

    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(logits_TV, logits_NTV[0].float())


def test_a_loaded_model_is_not_trained(tiny_target_params: TargetParams):
    model = load_model(bring_target(tiny_target_params, TargetModel.home), tiny_target_params)

    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_loading_says_nothing_and_leaves_the_noise_settings_as_they_were(
    tiny_target_params: TargetParams, capfd: pytest.CaptureFixture[str]
):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    target = bring_target(tiny_target_params, TargetModel.home)
    load_tokenizer(target)
    load_model(target, tiny_target_params)

    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_local_folder_needs_no_hub(
    tiny_target: Path, tiny_target_params: TargetParams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    target = bring_target(tiny_target_params, TargetModel.home)

    assert load_tokenizer(target).eos_token == "<|im_end|>"
    assert load_model(target, tiny_target_params).config.vocab_size == 320
