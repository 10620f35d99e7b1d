"""What can be wrong with a drafter's folder: how to do it, and where and how the check names it."""

from collections.abc import Callable

import torch
from drafter_folders import DRAFTED, VOCAB, WIDTH, Parts, drafter

Change = Callable[[Parts], object]
NORM = "midlayer.hidden_norm.weight"
KEY = "eagle_aux_hidden_state_layer_ids"


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda parts: parts.tensors.update({name: tensor})


def remade(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda parts: parts.tensors.update({name: make(parts.tensors[name])})


def dropped(name: str) -> Change:
    return lambda parts: parts.tensors.pop(name)


def key(name: str, value: object) -> Change:
    return lambda parts: parts.config.update({name: value})


def no_key(name: str) -> Change:
    return lambda parts: parts.config.pop(name)


def ids_everywhere(ids: list[int]) -> Change:
    def change(parts: Parts) -> None:
        parts.config[KEY] = ids
        parts.config["eagle_config"][KEY] = ids

    return change


def renamed(before: str, after: str) -> Change:
    def change(parts: Parts) -> None:
        parts.tensors = {n.replace(before, after, 1): t for n, t in parts.tensors.items()}

    return change


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[0, 0] = torch.nan
    return tensor


def swapped(d2t: torch.Tensor) -> torch.Tensor:
    ids = d2t + torch.arange(DRAFTED)
    ids[[3, 4]] = ids[[4, 3]]
    return ids - torch.arange(DRAFTED)


def repeating(d2t: torch.Tensor) -> torch.Tensor:
    d2t = d2t.clone()
    d2t[4] = d2t[3] - 1
    return d2t


def fresh_normal(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=torch.float32).normal_(0, 0.02).bfloat16()


def fresh_linear(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False).weight.detach().bfloat16()


def one_repeated_row(head: torch.Tensor) -> torch.Tensor:
    return torch.cat([head[1:2], head[1:]])


def ids_one_up(parts: Parts) -> None:
    """Both maps moved by one id: they agree with each other, and with no row of the head."""
    ids = (parts.tensors["d2t"] + torch.arange(DRAFTED) + 1).clamp(max=VOCAB - 1)
    parts.tensors["d2t"] = ids - torch.arange(DRAFTED)
    parts.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


MUTATIONS: dict[str, tuple[Change, str, str]] = {
    # Tensors: every name, shape, dtype and value.
    "tensor dropped": (dropped("fc.weight"), "fc.weight", "is missing"),
    "head dropped": (dropped("lm_head.weight"), "lm_head.weight", "is missing.*random"),
    "norm dropped": (dropped("norm.weight"), ": norm.weight", "is missing"),
    "tensor added": (put("midlayer.mlp.up_proj.bias", torch.ones(3)), "up_proj.bias", "not in the"),
    "embedding embedded": (
        put("embed_tokens.weight", torch.ones(VOCAB, WIDTH)),
        "embed_tokens.weight",
        "engines share the target's",
    ),
    "names of another layout": (renamed("midlayer.", "layers.0."), "layers.0.", "another layout"),
    "names with a prefix": (renamed("fc.", "model.fc."), "model.fc.weight", "another layout"),
    "tensor transposed": (remade("fc.weight", torch.t), "fc.weight", "its transpose"),
    "attention of half the width": (
        remade("midlayer.self_attn.q_proj.weight", lambda t: t[:, :WIDTH]),
        "q_proj.weight",
        r"has shape \[48, 32\]; config.json makes it \[48, 64\]",
    ),
    "tensor zeroed": (remade("midlayer.mlp.down_proj.weight", torch.zeros_like), "down_", "zero"),
    "norm zeroed": (remade(NORM, torch.zeros_like), NORM, "all zero"),
    "tensor constant": (remade("fc.weight", torch.ones_like), "fc.weight", "one value everywhere"),
    "float32 tensor": (remade("fc.weight", torch.Tensor.float), "fc.weight", "F32.*BF16"),
    "float16 head": (remade("lm_head.weight", torch.Tensor.half), "lm_head.weight", "F16.*BF16"),
    "NaN": (remade("fc.weight", with_nan), "fc.weight", "1 values that are not finite"),
    "infinity": (remade(NORM, lambda t: t / 0), NORM, "32 values that are not finite"),
    # The head.
    "head zeroed": (remade("lm_head.weight", torch.zeros_like), "lm_head.weight", "all zero"),
    "head fresh from a normal": (remade("lm_head.weight", fresh_normal), "lm_head", "looks random"),
    "head fresh from nn.Linear": (
        remade("lm_head.weight", fresh_linear),
        "lm_head",
        "looks random",
    ),
    "head of one row": (
        remade("lm_head.weight", lambda t: t[:1].expand_as(t)),
        "lm_head.weight",
        "39 of 40 rows that repeat",
    ),
    "head with a repeated row": (
        remade("lm_head.weight", one_repeated_row),
        "lm_head.weight",
        "row 1 is row 0",
    ),
    # The maps.
    "d2t dropped": (dropped("d2t"), "d2t", "is missing"),
    "t2d dropped": (dropped("t2d"), "t2d", "is missing"),
    "d2t absolute": (
        remade("d2t", lambda t: t + torch.arange(DRAFTED)),
        "d2t",
        "holds target ids; it must hold offsets",
    ),
    "d2t unsorted": (remade("d2t", swapped), "d2t", "does not rise: draft ids 3 and 4"),
    "d2t repeats an id": (
        remade("d2t", lambda t: t.index_fill(0, torch.tensor([3]), 0)),
        "d2t",
        "",
    ),
    "d2t out of range": (
        remade("d2t", lambda t: t.index_fill(0, torch.tensor([DRAFTED - 1]), VOCAB)),
        "d2t",
        "outside 0..95",
    ),
    "d2t negative": (remade("d2t", lambda t: t - 40), "d2t", "outside 0..95"),
    "d2t of int32": (remade("d2t", torch.Tensor.int), "d2t", "is I32; it must be I64"),
    "t2d of uint8": (remade("t2d", lambda t: t.to(torch.uint8)), "t2d", "is U8; it must be BOOL"),
    "t2d shifted": (remade("t2d", lambda t: t.roll(1)), "t2d", "they differ"),
    "t2d keeps too many": (remade("t2d", torch.ones_like), "t2d", "keeps 96 ids and d2t 40"),
    "maps beside a whole vocabulary": (
        lambda parts: (
            parts.__dict__.update(drafter(VOCAB).__dict__),
            put("d2t", torch.zeros(VOCAB, dtype=torch.int64))(parts),
        ),
        "d2t",
        "the whole one",
    ),
    # Layer ids.
    "ids missing": (no_key(KEY), KEY, "stands in eagle_config only"),
    "ids nowhere": (
        lambda parts: (no_key(KEY)(parts), no_key("eagle_config")(parts)),
        KEY,
        "is missing",
    ),
    "ids not nested": (no_key("eagle_config"), f"eagle_config.{KEY}", "SGLang"),
    "ids differ": (key(KEY, [2, 4, 6]), f"eagle_config.{KEY}", "the top level says"),
    "ids count outputs": (ids_everywhere([1, 3, 4]), KEY, "one off"),
    "ids two only": (ids_everywhere([2, 4]), KEY, "write 3 rising ids"),
    "ids unsorted": (ids_everywhere([5, 4, 2]), KEY, "rising"),
    "ids as text": (ids_everywhere(["2", "4", "5"]), KEY, "rising"),
    "aux states off": (
        lambda parts: parts.config["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state",
        "fc is then not used",
    ),
    # RoPE.
    "rope only legacy": (no_key("rope_parameters"), "rope_parameters", "is missing"),
    "rope only new": (no_key("rope_theta"), "rope_theta", "is missing"),
    "rope scaling missing": (no_key("rope_scaling"), "rope_scaling", "is missing"),
    "rope differs": (key("rope_theta", 5e5), "rope_parameters", "rope_theta and rope_scaling say"),
    "rope scaled in one spelling": (
        key("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        "rope_parameters",
        "'factor': 2.0",
    ),
    # The other keys.
    "tied": (key("tie_word_embeddings", True), "tie_word_embeddings", "is True"),
    "tie unsaid": (no_key("tie_word_embeddings"), "tie_word_embeddings", "is missing"),
    "architecture": (key("architectures", ["LlamaForCausalLM"]), "architectures", "is"),
    "model type": (key("model_type", "qwen3"), "model_type", "'qwen3'"),
    "dtype": (key("torch_dtype", "float32"), "torch_dtype", "'float32'"),
    "two layers": (key("num_hidden_layers", 2), "num_hidden_layers", "is 2"),
    "activation": (key("hidden_act", "gelu"), "hidden_act", "'gelu'"),
    "size missing": (no_key("head_dim"), "head_dim", "is missing"),
    "size of no number": (key("intermediate_size", "56"), "intermediate_size", "is '56'"),
    "size wrong": (key("intermediate_size", 64), "gate_proj.weight", r"makes it \[64, 32\]"),
    "heads do not divide": (key("num_key_value_heads", 4), "num_key_value_heads", "not divide"),
    "epsilon": (key("rms_norm_eps", 0), "rms_norm_eps", "is 0"),
    "draft vocabulary above the target's": (key("vocab_size", 8), "draft_vocab_size", "above"),
    "draft vocabulary as vocab_size": (key("vocab_size", DRAFTED), "t2d", "the whole one"),
    "widths differ": (key("target_hidden_size", 64), "target_hidden_size", "must be one"),
    "norm before fc": (key("norm_before_fc", True), "norm_before_fc", "tensors that this contract"),
    "biases": (key("attention_bias", True), "attention_bias", "tensors that this contract"),
    "norm flag as text": (key("norm_before_residual", "no"), "norm_before_residual", "is 'no'"),
    "norm output as text": (key("norm_output", "no"), "norm_output", "is 'no'"),
    "fc norm without its tensors": (key("fc_norm", True), "fc_norm.0.weight", "is missing.*random"),
    "fc norm unsaid": (
        put("fc_norm.0.weight", torch.ones(WIDTH).bfloat16()),
        "fc_norm.0.weight",
        "not in the contract",
    ),
    "aux states": (key("num_aux_hidden_states", 4), "num_aux_hidden_states", "is 4"),
    "quantised": (key("quantization_config", {"bits": 4}), "quantization_config", "bfloat16"),
}

AGAINST_THE_TARGET: dict[str, tuple[Change, str, str]] = {
    "another target's vocabulary": (key("vocab_size", 97), "vocab_size", "the target's is 96"),
    "another target's width": (key("hidden_size", 64), "hidden_size", "the target's is 32"),
    "ids one down": (ids_everywhere([1, 3, 4]), KEY, r"write \[2, 4, 5\]"),
    "ids one up": (ids_everywhere([3, 5, 6]), KEY, r"write \[2, 4, 5\]"),
    "ids above the depth": (ids_everywhere([2, 4, 9]), KEY, "the target has 8 layers"),
    "maps one id up": (ids_one_up, "lm_head.weight", "does not sit at its ids"),
    "head shuffled": (remade("lm_head.weight", lambda t: t.flip(0)), "lm_head", "not sit at its"),
    "head fresh": (remade("lm_head.weight", fresh_normal), "lm_head.weight", "looks random"),
    "head with a repeated row": (remade("lm_head.weight", one_repeated_row), "lm_head", "repeat"),
}
