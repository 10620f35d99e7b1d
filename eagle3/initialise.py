"""Where training starts: the drafter's first weights, taken from the target where they can be."""

from pathlib import Path

import torch
from torch import Tensor

from eagle3.config import TrainParams
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.errors import CheckpointError
from eagle3.maps import VocabMaps
from eagle3.warm_start import published_drafter


def first_drafter(
    shape: DraftShape,
    params: TrainParams,
    aux_layers: tuple[int, int, int],
    maps: VocabMaps,
    norm_H: Tensor,
    head_VH: Tensor,
) -> DrafterNet:
    """The drafter that a run starts from: new or published, its head trained or the target's.

    Args:
        norm_H: the target's final norm.
        head_VH: the target's head.

    Raises:
        CheckpointError: `train.init_from` is not a drafter that this run can go on from.
    """
    if params.init_from is None:
        net = new_drafter(shape, params, maps, norm_H, head_VH)
    else:
        net = published_drafter(Path(params.init_from), shape, aux_layers, maps)
    if params.head == "frozen":
        freeze_head(net, head_VH[maps.ids_D.cpu()].float(), params.init_from)
    return net


def freeze_head(net: DrafterNet, rows_DH: Tensor, init_from: str | None) -> None:
    """Keep the target's rows as the draft head, out of reach of gradient and optimizer.

    Raises:
        CheckpointError: the drafter of `init_from` has another head.
    """
    head = net.lm_head.weight
    # A published head is the target's rounded to bfloat16, as checkpoints hold it.
    if init_from is not None and not torch.equal(head.bfloat16(), rows_DH.bfloat16()):
        raise CheckpointError(
            f"{init_from} (train.init_from) has a head of its own, not the target's rows, so it "
            "cannot be frozen; set train.head to trained"
        )
    with torch.no_grad():
        head.copy_(rows_DH)
    head.requires_grad_(False)


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
