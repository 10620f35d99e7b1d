"""A random Llama of 8 layers, made in a second: a target for benchmarks of what is around it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.config import TargetParams
from eagle3.target.quiet import quiet_transformers

SHAPE = {"num_layers": 8, "hidden_size": 32, "vocab_size": 320}


def save_tiny_target(folder: Path) -> TargetParams:
    """Write its Hugging Face folder; the `target` section that takes it from there."""
    words = {f"<{id_}>": id_ for id_ in range(SHAPE["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")), eos_token="<2>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden_size"],
        intermediate_size=64,
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.25,
        dtype="float32",
    )
    with quiet_transformers():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return TargetParams.model_validate(
        {
            "source": str(folder),
            "shape": SHAPE,
            "aux_layers": "default",
            "weights": "copy",
            "trust_remote_code": False,
            "dtype": "float32",
            "device": "cpu",
        }
    )
