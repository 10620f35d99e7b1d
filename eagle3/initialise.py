"""Where training starts: the drafter's first weights, taken from the target where they can be."""

import torch
from torch import Tensor

from eagle3.config import TrainParams
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.maps import VocabMaps


def new_drafter(
    shape: DraftShape, params: TrainParams, maps: VocabMaps, norm_H: Tensor, head_VH: Tensor
) -> DrafterNet:
    """An untrained drafter: the same for the same seed, whatever ran before.

    The layer's two outputs start at zero and fc passes the highest aux state through, so that it
    begins by reading what the target knows late; the head and its norm start from the target's, or
    at random. After 120 steps of the default run this is worth 1.45 against 1.36 of fc at random
    (learning rate 2e-3, replay at k = 3; docs/decisions/0008-first-weights-of-the-drafter.md).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed)
        net = DrafterNet(shape)
    with torch.no_grad():
        net.midlayer.self_attn.o_proj.weight.zero_()
        net.midlayer.mlp.down_proj.weight.zero_()
        net.fc.weight.zero_()
        net.fc.weight[:, 2 * shape.hidden_size :].fill_diagonal_(1.0)
        if params.head_init == "target":
            net.lm_head.weight.copy_(head_VH[maps.ids_D])
            net.norm.weight.copy_(norm_H)
    return net
