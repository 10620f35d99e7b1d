"""How fast a drafter would train: what was measured, scaled by floating-point operations a token.

The measured rates are those of benchmarks/results/train_step.json, all at one shape. Another shape,
draft vocabulary or number of steps is given the operations per second of the nearest record:
a small shape reaches less.

Letters: N tokens of a micro-batch, S steps of the training-time test, D draft vocabulary.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.config import HeadProducts
from eagle3.drafter import DraftShape
from eagle3.errors import ParamsError

RESULTS = Path("benchmarks/results/train_step.json")
MEASURED_SHAPE = DraftShape(
    hidden_size=7168,
    vocab_size=163_840,
    draft_vocab=32_000,
    intermediate_size=18_432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    max_position_embeddings=262_144,
)
"""Of all records: that of benchmarks/train_step.py by default, Kimi-K2.5's."""


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one GPU, every token supervised, and where the figure is from."""

    tokens_per_s: float
    basis: str


def step_flops(shape: DraftShape, tokens: int, ttt_steps: int, head_trained: bool = True) -> float:
    """Operations of one step over a document of N tokens: products and attention, both passes.

    A product costs 2 a multiplication forward and twice that backward. Rows that count nowhere are
    not computed, and the embedding half of q, k, v is computed once (ttt.py).
    """
    width, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    # Row t of step i is fed token t + 1 + i, which the target predicts from: 1 to N - 2.
    rows = [max(tokens - 2 - step, 0) for step in range(ttt_steps)]
    forward = 2.0 * width * width * tokens  # fc, whose input needs no gradient
    forward += (queries + keys) * width * tokens  # the embedding half
    forward += keys * width * tokens + queries * width * rows[0]
    forward += (queries + keys) * width * sum(rows[1:])
    forward += (queries * width + 3 * width * shape.intermediate_size) * sum(rows)
    forward += shape.draft_vocab * width * sum(rows) * (1 if head_trained else 2 / 3)
    seen = sum(count * (count + 1) / 2 + count * step for step, count in enumerate(rows))
    forward += 2 * queries * seen
    # The target's head has no backward pass.
    return 6 * forward + 2 * shape.vocab_size * width * max(tokens - 2, 0)


def recompute_flops(shape: DraftShape, tokens: int, ttt_steps: int) -> float:
    """Operations that `train.recompute` adds: products of a step other than attention, once."""
    width, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    rows = [max(tokens - 2 - step, 0) for step in range(ttt_steps)]
    forward = queries * width * rows[0] + (queries + keys) * width * sum(rows[1:])
    return 2.0 * (forward + (queries + 3 * shape.intermediate_size) * width * sum(rows))


def rate(
    shape: DraftShape,
    tokens: int,
    ttt_steps: int,
    head_trained: bool = True,
    recompute: bool = False,
    results: Path = RESULTS,
    head_products: HeadProducts = "dtype",
) -> Rate | None:
    """Look up or scale the rate of one GPU; None where there is no measurement to start from.

    What was measured without recomputation is scaled to it where nothing with it was. With float8
    head products and none measured, the rate is that without them.

    Raises:
        ParamsError: the file of results is damaged.
    """
    records = [
        record
        for record in _records(results)
        if record["head_trained"] == head_trained
        and record["head_products"] in ("dtype", head_products)
    ]
    if not records:
        return None

    def distance(record: dict[str, Any]) -> tuple[float, ...]:
        far = [
            abs(math.log(record[name] / here))
            for name, here in (
                ("ttt", ttt_steps),
                ("draft_vocab", shape.draft_vocab),
                ("tokens", tokens),
            )
        ]
        # Of equally near ones the slowest: two runs of a case differ by some percent.
        choices = (record["head_products"] != head_products, record["recompute"] != recompute)
        return (*choices, *far, record["tokens_per_s"])

    def flops(shape: DraftShape, tokens: int, ttt_steps: int, recompute: bool) -> float:
        more = recompute_flops(shape, tokens, ttt_steps) if recompute else 0.0
        return step_flops(shape, tokens, ttt_steps, head_trained) + more

    nearest = min(records, key=distance)
    case = (nearest["tokens"], nearest["ttt"], nearest["recompute"])
    then = replace(MEASURED_SHAPE, draft_vocab=nearest["draft_vocab"])
    name = (
        f"{nearest['device']}, {nearest['date']}: {nearest['tokens_per_s']:,.0f} tokens/s at the "
        f"Kimi-K2.5 shape, TTT {nearest['ttt']}, batches of {nearest['tokens']:,}, draft "
        f"vocabulary {nearest['draft_vocab']:,}, {'trained' if head_trained else 'frozen'} head"
    )
    name += ", recomputation" if nearest["recompute"] else ""
    name += ", float8 head products" if nearest["head_products"] == "float8" else ""
    same = _same_work(shape, then) and nearest["head_products"] == head_products
    if same and case == (tokens, ttt_steps, recompute):
        return Rate(nearest["tokens_per_s"], f"measured on {name}")
    per_token = flops(shape, tokens, ttt_steps, recompute) / tokens
    per_token_then = flops(then, *case) / nearest["tokens"]
    scaled = nearest["tokens_per_s"] * per_token_then / per_token
    basis = f"not measured: scaled by operations a token from {name}; a smaller shape reaches less"
    return Rate(scaled, basis)


def _same_work(one: DraftShape, other: DraftShape) -> bool:
    """Whether two shapes make the same products; RoPE's base and the like cost nothing."""

    def products(shape: DraftShape) -> DraftShape:
        return replace(
            shape,
            rms_norm_eps=0.0,
            rope_theta=0.0,
            max_position_embeddings=0,
        )

    return products(one) == products(other)


def _records(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    try:
        records = json.loads(results.read_text())
        return [
            # Records of before there was a choice.
            {"recompute": False, "head_products": "dtype"} | record
            for record in records
            if record["trainer"] == "eagle3"
            and record["supervised"] == 1
            and "H200" in record["device"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ParamsError(
            f"{results} holds no records of the training step ({error!r}); take it from git, or "
            "measure with benchmarks/train_step.py"
        ) from error
