"""What a draft step, a target step and a check of k + 1 tokens cost, on the machine at hand.

Batch size one, both models with a KV cache of a context that real rows have. Every figure is the
median of repeats after a warm-up, in microseconds; caches are rolled back after each repeat, so
that all see the same context. The times are this machine's; their ratios travel better.

Shapes: N tokens, H target width.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from eagle3.generate import DraftDecoder, TargetDecoder

Result = TypeVar("Result")

WARM_UP = 3
"""Untimed repeats: first calls allocate memory and, on a GPU, pick kernels."""


@dataclass(frozen=True)
class StepCosts:
    """Medians, in microseconds."""

    context: int
    """Tokens in the caches."""
    draft_step_us: float
    """Embedding, layer, head and choice: one drafted token."""
    draft_layer_us: float
    draft_head_us: float
    """Final norm, draft head and choice: the part that the draft vocabulary decides."""
    target_step_us: float
    """One token."""
    verify_step_us: dict[int, float]
    """For each k, k + 1 tokens at once."""

    @property
    def draft_cost(self) -> float:
        """A draft step in plain target steps, the speed model's c."""
        return self.draft_step_us / self.target_step_us

    def verify_cost(self, k: int) -> float:
        """A check of k + 1 tokens in plain target steps, the speed model's v."""
        return self.verify_step_us[k] / self.target_step_us


class Stopwatch:
    """Wall times by name, the device's queue drained before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, step: Callable[[], Result]) -> Result:
        """Run a step, and note how long it took."""
        self._drain()
        started = time.perf_counter()
        result = step()
        self._drain()
        self.seconds[name].append(time.perf_counter() - started)
        return result

    def median_us(self, *names: str) -> float:
        """Median of a step in microseconds; of several, that of their sum, call by call."""
        sums = map(sum, zip(*(self.seconds[name] for name in names), strict=True))
        return 1e6 * statistics.median(sums)

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.inference_mode()
def measure_costs(
    target: TargetDecoder,
    drafter: DraftDecoder,
    context: Sequence[int],
    draft_tokens: Sequence[int],
    repeats: int,
) -> StepCosts:
    """Time every step after `context`, two or more token ids. Both decoders must be new.

    Each repeat is a plain step, then for each k what decoding does: k draft steps and a check. So
    what else the machine does slows all alike, and weights are in a processor's cache where they
    would be in use.
    """
    assert target.length == drafter.cache.length == 0, "a decoder that already holds tokens"
    _, aux_N3H = target.step(context)
    # The drafter is one row behind: the row of the last token waits for the token after it.
    hidden_1H = drafter.append(context[1:], aux_N3H[:-1])
    known, token = drafter.cache.length, context[-1]

    def layer() -> Tensor:
        drafted_1H = drafter.step([token], hidden_1H)
        drafter.cache.truncate(known)
        return drafted_1H

    def check(count: int) -> None:
        logits_NV, _ = target.step([token] * count)
        logits_NV.argmax(dim=-1).tolist()
        target.forget(count)

    watch = Stopwatch(drafter.embedding_VH.device)
    for repeat in range(WARM_UP + repeats):
        if repeat == WARM_UP:
            watch.seconds.clear()
        _time_cycles(watch, draft_tokens, layer, drafter.pick, check)
    return StepCosts(
        context=len(context),
        draft_step_us=watch.median_us("layer", "head"),
        draft_layer_us=watch.median_us("layer"),
        draft_head_us=watch.median_us("head"),
        target_step_us=watch.median_us("plain"),
        verify_step_us={k: watch.median_us(f"check {k}") for k in draft_tokens},
    )


def _time_cycles(
    watch: Stopwatch,
    draft_tokens: Sequence[int],
    layer: Callable[[], Tensor],
    head: Callable[[Tensor], object],
    check: Callable[[int], None],
) -> None:
    watch.time("plain", partial(check, 1))
    for k in draft_tokens:
        for _ in range(k):
            watch.time("head", partial(head, watch.time("layer", layer)))
        watch.time(f"check {k}", partial(check, k + 1))
