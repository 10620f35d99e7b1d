"""A tiny drafter, its target's head and a packed batch, in float64, for tests of the unrolling."""

import torch
from torch import Tensor
from toys import TOY_SHAPE, toy_drafter, toy_maps

from eagle3.attention import Documents
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.loss import TargetHead
from eagle3.maps import VocabMaps
from eagle3.ttt import Batch

# Two turns with glue between them, an answer that ends its row, an answer of one token, no answer.
MASKS = ("0001111001110", "0011111", "000010", "00000")


def toy_batch(
    seed: int = 0, masks: tuple[str, ...] = MASKS, shape: DraftShape = TOY_SHAPE
) -> tuple[DrafterNet, Batch, Tensor, TargetHead, VocabMaps]:
    """Rows with these loss masks; also the drafter, the embedding [V, H], the head and the maps."""
    generator = torch.Generator().manual_seed(seed)
    width, vocab = shape.hidden_size, shape.vocab_size

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bounds = [0]
    for row in masks:
        bounds.append(bounds[-1] + len(row))
    count = bounds[-1]
    batch = Batch(
        tokens_N=torch.randint(vocab, (count,), generator=generator),
        loss_mask_N=torch.tensor([c == "1" for row in masks for c in row]),
        aux_N3H=randn(count, 3, width),
        last_NH=randn(count, width),
        documents=Documents(tuple(bounds)),
    )
    head = TargetHead(randn(width).abs(), shape.rms_norm_eps, randn(vocab, width))
    return toy_drafter(shape, seed), batch, randn(vocab, width), head, toy_maps(shape, seed)
