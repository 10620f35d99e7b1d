"""Drafter and target folders built by hand, tensor by tensor, without our own writer.

Letters: D draft vocabulary, V target vocabulary, H width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DRAFTED, WIDTH, LAYERS = 96, 40, 32, 8
IDS = [2, 4, 5]


@dataclass
class Parts:
    """What a drafter's folder is made of, to be changed before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def target_head() -> Tensor:
    """A head [V, H] with the low rank that training leaves."""
    generator = torch.Generator().manual_seed(7)
    topics = torch.randn(VOCAB, 4, generator=generator) @ torch.randn(4, WIDTH, generator=generator)
    return topics + 0.3 * torch.randn(VOCAB, WIDTH, generator=generator)


def kept_ids() -> Tensor:
    """The target ids [D] of the draft vocabulary: neighbours and gaps."""
    generator = torch.Generator().manual_seed(8)
    return torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values


def drafter(drafted: int = DRAFTED, norms: bool = False) -> Parts:
    """A sound drafter in the plain format; `drafted` of VOCAB drops the maps.

    `norms` are those of EAGLE-3.1.
    """
    generator = torch.Generator().manual_seed(9)

    def weights(*shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=generator)).bfloat16()

    ids_D = kept_ids() if drafted == DRAFTED else torch.arange(VOCAB)
    tensors = {
        "fc.weight": weights(WIDTH, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": weights(48, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": weights(24, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": weights(24, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": weights(WIDTH, 48),
        "midlayer.mlp.gate_proj.weight": weights(56, WIDTH),
        "midlayer.mlp.up_proj.weight": weights(56, WIDTH),
        "midlayer.mlp.down_proj.weight": weights(WIDTH, 56),
        "lm_head.weight": target_head()[ids_D].bfloat16(),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = torch.ones(WIDTH).bfloat16()
    tensors["norm.weight"] = torch.ones(WIDTH).bfloat16()
    if norms:
        tensors |= {f"fc_norm.{state}.weight": torch.ones(WIDTH).bfloat16() for state in range(3)}
    if drafted == DRAFTED:
        tensors["d2t"] = ids_D - torch.arange(DRAFTED)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids_D, True)
    switches = {"fc_norm": True, "norm_output": True} if norms else {}
    return Parts(_config(drafted) | switches, tensors)


def _config(drafted: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "intermediate_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCAB,
        "draft_vocab_size": drafted,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": IDS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True},
    }


def write_target(folder: Path) -> Path:
    """A Hugging Face folder with the config, head and embedding of a target, and no more."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"lm_head.weight": target_head(), "model.embed_tokens.weight": target_embedding()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_embedding() -> Tensor:
    """The target's input embedding [V, H]."""
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(11))
