"""What a serving engine needs of a drafter's folder, as data: config keys, tensors and layer ids.

Plain format: `config.json` and `model.safetensors`, as SGLang and vLLM load them. Both engines skip
names that they do not know and never report a missing one, so this table is where completeness is
defined: `eagle3.check` proves it, `eagle3.export` and `eagle3.importer` convert from and to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

ARCHITECTURE = "LlamaForCausalLMEagle3"
DRAFTER_LAYERS = 1
AUX_STATES = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"

Format = Literal["plain", "speculators"]
"""What engines load: SGLang the first, vLLM both."""

WeightDtype = Literal["bfloat16", "int64", "bool"]

HEADER_DTYPES: dict[WeightDtype, str] = {"bfloat16": "BF16", "int64": "I64", "bool": "BOOL"}
"""How a safetensors header spells each dtype."""

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)
"""Keys of config.json that must be positive integers. `vocab_size` is the target's."""

FIXED: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "num_hidden_layers": DRAFTER_LAYERS,
    "hidden_act": "silu",
    # False also where the target ties: a copied True turns the draft head into the embedding.
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Keys of config.json that have one value in every drafter."""

NOT_IN_THE_TABLE = ("norm_before_fc", "attention_bias", "qkv_bias", "mlp_bias")
"""Optional switches that add tensors which no drafter of this contract has: absent or false."""

NORM_SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")
"""Switches that make another network: true or false; absent, in the plain format, means false.

`fc_norm` adds a norm for each aux state. `norm_output` feeds back the normed state, in SGLang, vLLM
and speculators; SpecForge up to its #879 read the same word as "norm before the head".
"""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of `model.safetensors`."""

    shape: tuple[int, ...]
    dtype: WeightDtype


def rope_keys(rope_theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Spell RoPE twice: readers before transformers 5 know the legacy keys only, later the new."""
    return {
        "rope_theta": rope_theta,
        "rope_scaling": dict(scaling) if scaling else None,
        "rope_parameters": rope_parameters(rope_theta, scaling),
    }


def rope_parameters(rope_theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Translate the legacy keys to transformers 5's one. `type` is an older name of `rope_type`."""
    kept = {key: value for key, value in (scaling or {}).items() if key != "type"}
    kind = kept.get("rope_type") or (scaling or {}).get("type") or "default"
    return {**kept, "rope_type": kind, "rope_theta": rope_theta}


def draft_config(
    *,
    aux_layers: Sequence[int],
    hidden_size: int,
    target_hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    rms_norm_eps: float,
    rope_theta: float,
    max_position_embeddings: int,
    vocab_size: int,
    draft_vocab_size: int,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> dict[str, Any]:
    """Build config.json of the plain format.

    `vocab_size` is the target's, also for a reduced vocabulary. `aux_layers` are in our convention.
    The ids stand twice: vLLM's newer runner reads the top level, SGLang reads `eagle_config`. The
    norms of EAGLE-3.1 are written where they are used alone: older readers know neither key.
    """
    norms = {"fc_norm": fc_norm, "norm_output": norm_output}
    return {
        **FIXED,
        "hidden_size": hidden_size,
        "target_hidden_size": target_hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": rms_norm_eps,
        **rope_keys(rope_theta, None),
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "norm_before_residual": False,
        **{key: used for key, used in norms.items() if used},
        **layer_id_keys(aux_layers),
    }


def layer_id_keys(aux_layers: Sequence[int]) -> dict[str, Any]:
    """Write the layer ids in both places where engines look for them."""
    ids = list(aux_layers)
    return {LAYER_IDS: ids, NESTED: {LAYER_IDS: ids, "use_aux_hidden_state": True}}


def tensor_table(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Name every tensor that the folder of this plain config must hold; no other may be there.

    `d2t` (offsets: draft id i is target id `i + d2t[i]`) and `t2d` (mask of the kept target ids)
    belong to a reduced vocabulary only.
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    target_width = config.get("target_hidden_size") or width
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    vocab, drafted = config["vocab_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, AUX_STATES * target_width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        # Twice the width: attention reads the normed embedding beside the normed state.
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (drafted, width),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{state}.weight": (target_width,) for state in range(AUX_STATES)}
    table = {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}
    if drafted != vocab:
        table["d2t"] = TensorSpec((drafted,), "int64")
        table["t2d"] = TensorSpec((vocab,), "bool")
    return table


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The ids that engines assume where a drafter names none, in our convention."""
    return 2, num_layers // 2, num_layers - 3


def from_output_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Turn ids that name the layer whose output is meant, counted from 0, into ours.

    SpecForge, ModelOpt, TorchSpec and AngelSlim count so: their (1, 29, 57) is our (2, 30, 58),
    "the residual stream after that many layers", which vLLM and speculators share.
    """
    return tuple(layer + 1 for layer in ids)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the speculators format rather than the plain one."""
    return "speculators_model_type" in config


def plain_view(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a speculators config as the plain one that an engine makes of it; a plain one as it is.

    In the speculators format an absent `norm_before_residual` means True, in the plain one False.
    """
    if not is_speculators(config):
        return {"norm_before_residual": False, **config}
    layer = config.get("transformer_layer_config")
    outer = {"norm_before_residual": True, **config}
    outer.pop("transformer_layer_config", None)
    return {**(layer if isinstance(layer, Mapping) else {}), **outer}


def plain_name(name: str) -> str:
    """Turn another trainer's spelling of a tensor's name into the plain format's."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
