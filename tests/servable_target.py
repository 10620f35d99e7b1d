"""The tiny target as vLLM serves it on a CPU."""

import shutil
from pathlib import Path

import torch

HEAD_DIM = 32
"""The narrowest that vLLM's CPU attention knows."""


def servable_target(tiny_target: Path, folder: Path) -> Path:
    """The tiny target with heads as wide as vLLM's CPU attention knows them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny_target, folder)
    config = LlamaConfig.from_pretrained(folder)
    config.head_dim = HEAD_DIM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
