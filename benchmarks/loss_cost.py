"""Processor time of each loss of the head and its gradient, on one thread, over synthetic logits.

    python benchmarks/loss_cost.py

A line of JSON for each spread (standard deviation of the drafter's logits) and loss: seconds as it
is, and with the processor told to take numbers below the normal ones for 0. Far apart, such numbers
cost time that no result is worth (eagle3/loss.py).
"""

import argparse
import json
import sys
import time

import torch
from torch import Tensor

from eagle3.loss import ROW_LOSSES, TargetPrediction, head_loss

D, H, M = 32000, 576, 64
SPREADS = (4, 8, 12, 20)
AGREEMENT = 0.7
"""Correlation of the drafter's and the target's logits."""


def seconds(hidden_MH: Tensor, weight_DH: Tensor, target: TargetPrediction, flushed: bool) -> float:
    """The best of three forward and backward passes."""
    torch.set_flush_denormal(flushed)
    best = float("inf")
    for _ in range(3):
        hidden, weight = hidden_MH.clone().requires_grad_(), weight_DH.clone().requires_grad_()
        started = time.process_time()
        total, _ = head_loss(hidden, weight, target, torch.arange(M))
        total.backward()
        best = min(best, time.process_time() - started)
    torch.set_flush_denormal(False)
    return round(best, 3)


def main() -> None:
    """Time every loss at every spread."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight_DH = torch.randn(D, H, generator=generator) / H**0.5
    for spread in SPREADS:
        hidden_MH = torch.randn(M, H, generator=generator) * spread
        noise_MD = torch.randn(M, D, generator=generator) * spread * (1 - AGREEMENT**2) ** 0.5
        logits_MD = AGREEMENT * hidden_MH @ weight_DH.T + noise_MD
        for loss in ROW_LOSSES:
            target = TargetPrediction(logits_MD.softmax(-1), logits_MD.argmax(-1), loss)
            given = (hidden_MH, weight_DH, target)
            facts = {"spread": spread, "loss": loss}
            facts |= {name: seconds(*given, name == "flushed") for name in ("as_is", "flushed")}
            sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
