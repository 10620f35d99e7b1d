"""Activation recomputation: the same gradients from less that is kept, on both paths."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_batches import MASKS, toy_batch
from toys import NORM_SHAPE, TOY_SHAPE

from eagle3.config import load_params
from eagle3.counts import parameter_table
from eagle3.drafter import DraftShape
from eagle3.footprint import Work, hot_peak
from eagle3.hot.step import HotPath
from eagle3.loss import head_loss, predict_target
from eagle3.throughput import MEASURED_SHAPE, rate
from eagle3.ttt import plan_unrolling, unroll

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/train_step.json"
WEIGHTS = [0.8**step for step in range(4)]
SHAPE = replace(TOY_SHAPE, intermediate_size=32 * TOY_SHAPE.intermediate_size)


def plain(recompute: bool, masks: tuple[str, ...], shape: DraftShape) -> dict[str, Tensor]:
    """Loss, and the gradients of two equal micro-batches, by the plain path."""
    net, batch, embedding_VH, head, maps = toy_batch(masks=masks, shape=shape)
    unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, len(WEIGHTS))
    prediction = predict_target(head, maps, batch.last_NH[unrolling.predictors_U])
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        steps = unroll(net, batch, embedding_VH[batch.tokens_N], unrolling, recompute)
        for weight, (step, state) in zip(WEIGHTS, steps, strict=True):
            hidden = net.head_input(state[step.counted_M])
            nats, _ = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
            total = total + weight * nats
        total.backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return found | {"loss": total.detach()}


def hot(recompute: bool, masks: tuple[str, ...], shape: DraftShape) -> dict[str, Tensor]:
    """As `plain`, by the hot path."""
    net, batch, embedding_VH, head, maps = toy_batch(masks=masks, shape=shape)
    path = HotPath(net, embedding_VH, head, maps, recompute=recompute)
    for _ in range(2):
        figures = path.backward(batch, WEIGHTS)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return found | {"loss": figures.nats_S}


Way = Callable[[bool, tuple[str, ...], DraftShape], dict[str, Tensor]]
PATHS = pytest.mark.parametrize("path", [plain, hot])


@PATHS
@pytest.mark.parametrize("shape", [TOY_SHAPE, NORM_SHAPE], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("masks", [MASKS, ("1" * 9,), ("0011", "011")])
def test_gradients_are_those_without_recomputation(
    path: Way, shape: DraftShape, masks: tuple[str, ...]
) -> None:
    kept, again = (path(recompute, masks, shape) for recompute in (False, True))

    assert again.keys() == kept.keys()
    for name, expected in kept.items():
        torch.testing.assert_close(again[name], expected, rtol=1e-12, atol=1e-12)


@PATHS
def test_less_is_kept_for_the_backward_pass(path: Way) -> None:
    def kept(recompute: bool) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            # A backward pass that computes again saves too, but one step at a time.
            if torch._C._current_graph_task_id() == -1:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            # Held by the graph, so that no later tensor takes its address.
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            path(recompute, ("1" * 60,), SHAPE)
        return sum(sizes.values())

    assert kept(True) < 0.5 * kept(False)


def test_the_plan_knows_that_less_is_kept_and_that_it_takes_longer() -> None:
    kimi = load_params(ROOT / "presets/kimi-k2.5.yaml")
    table = parameter_table(kimi, 32_000)
    work = Work(8192, 7, accumulate=1, held=1, recompute=False)
    kept, again = (
        sum(hot_peak(table, MEASURED_SHAPE, replace(work, recompute=recompute)).values())
        for recompute in (False, True)
    )
    rates = [
        rate(MEASURED_SHAPE, 8192, 7, recompute=recompute, results=RESULTS)
        for recompute in (False, True)
    ]

    h, i, q = 7168, 18_432, 64 * 128
    # Fullest is the last step but one, whose own parts, but for its state's norm, are there anyway.
    assert kept - again == 2 * 8192 * (6 * (3 * h + q + 3 * i) - (2 * h + q + 3 * i))
    assert all(found is not None for found in rates)
    faster, slower = (found.tokens_per_s for found in rates if found is not None)
    assert 0.7 * faster < slower < faster
