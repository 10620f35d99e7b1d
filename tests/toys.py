"""Tiny drafters and sequences for the tests of the network, its checkpoints and replay."""

from dataclasses import replace

import torch
from torch import Tensor

from eagle3.drafter import DrafterNet, DraftShape
from eagle3.maps import VocabMaps

TOY_SHAPE = DraftShape(
    hidden_size=8,
    vocab_size=23,
    draft_vocab=11,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=64,
)
NORM_SHAPE = replace(TOY_SHAPE, fc_norm=True, norm_output=True)
"""With the norms of EAGLE-3.1."""

SHAPES = {
    "eagle3": TOY_SHAPE,
    "fc_norm": replace(TOY_SHAPE, fc_norm=True),
    "norm_output": replace(TOY_SHAPE, norm_output=True),
    "eagle3.1": NORM_SHAPE,
}


def toy_drafter(shape: DraftShape = TOY_SHAPE, seed: int = 0) -> DrafterNet:
    """A drafter whose every weight matters, in float64."""
    net = DrafterNet(shape).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.4)
    return net


def toy_maps(shape: DraftShape = TOY_SHAPE, seed: int = 0) -> VocabMaps:
    """A draft vocabulary that is spread over the target's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab].sort().values
    kept = torch.zeros(shape.vocab_size, dtype=torch.bool)
    kept[ids] = True
    return VocabMaps(ids - torch.arange(shape.draft_vocab), kept)


def toy_sequence(length: int, shape: DraftShape = TOY_SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T], aux states [T, 3, H] and an embedding [V, H]."""
    generator = torch.Generator().manual_seed(length)
    width, vocab = shape.hidden_size, shape.vocab_size
    tokens = torch.randint(vocab, (length,), generator=generator)
    aux = torch.randn(length, 3, width, generator=generator, dtype=torch.float64)
    embedding = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    return tokens, aux, embedding
