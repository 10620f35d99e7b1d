"""Clipping inside AdamW against torch's clipping before it."""

import torch
from torch import nn

from eagle3.optimizer import adamw, clip_and_update


def test_updates_are_those_of_clipped_gradients_above_the_norm_and_below() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = adamw(ours, 0.1, (0.9, 0.95), 0.01)
    expected = torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    for size in (10.0, 0.01):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine) * size
            other.grad = mine.grad.clone()
        norm = clip_and_update(optimizer, 0.5)
        expected_norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        expected.step()

        torch.testing.assert_close(norm, expected_norm)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is None
            torch.testing.assert_close(mine, other)
