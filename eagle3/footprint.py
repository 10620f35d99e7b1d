"""Bytes of a training run before there is one: on disk, and in a GPU at the step's fullest moment.

Every entry is a tensor that the code named beside it holds. Allocated bytes: torch's cache, CUDA's
context and NCCL's buffers come on top. tests/eagle3/test_plan.py holds the sum to the peaks that
benchmarks/results/train_step.json measured, and the fixed parts to the tensors of a real trainer.

Letters: N tokens of a micro-batch, S steps of the training-time test, H width, I width of the MLP,
Q query columns, C key columns, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass

from eagle3.config import Dtype, HeadProducts, StateDtype
from eagle3.counts import ParameterTable
from eagle3.drafter import DraftShape
from eagle3.hot.float8 import TURNED_AT_ONCE
from eagle3.hot.head import DRAFT_LOGITS_AT_ONCE
from eagle3.store.ratio import EXPECTED_RATIO, READ_BYTES

HEAD = "lm_head.weight"
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """What one process has before it."""

    tokens: int
    """Of a micro-batch, every one supervised: the most that a step can hold."""
    ttt_steps: int
    accumulate: int
    """Micro-batches of one optimizer step in this process."""
    held: int
    """Micro-batches on the device: those of this step, and those that are read ahead."""
    recompute: bool
    """Whether a step keeps its state and what attention needs alone (hot.step.HotPath._again)."""
    head_products: HeadProducts = "dtype"
    sharers: int = 1
    """Processes that each hold a part of weights and moments (`train.sharding`)."""


@dataclass(frozen=True)
class Network:
    """Parameters of the drafter's tensors, by what training does with them."""

    all: int
    matrices: int
    head: tuple[int, int]
    """D and H."""
    trained: int
    head_trained: bool

    @classmethod
    def of(cls, table: ParameterTable) -> "Network":
        """From the table, whose other tensors are the target's own. A frozen head is the net's."""
        own = [tensor for tensor in table.tensors if tensor.trainable or tensor.name == HEAD]
        (head,) = (tensor for tensor in own if tensor.name == HEAD)
        return cls(
            all=sum(tensor.parameters for tensor in own),
            matrices=sum(tensor.parameters for tensor in own if len(tensor.shape) == 2),
            head=(head.shape[0], head.shape[1]),
            trained=table.trainable,
            head_trained=head.trainable,
        )


def state_bytes(hidden_size: int, tokens: int, dtype: StateDtype) -> tuple[int, int]:
    """Hidden states of `tokens` tokens: raw bytes (four states a token), and bytes in the store."""
    raw = 4 * hidden_size * READ_BYTES[dtype] * tokens
    return raw, round(raw * EXPECTED_RATIO[dtype])


def drafter_bytes(table: ParameterTable, vocab_size: int) -> int:
    """model.safetensors: bfloat16 weights; d2t in int64 and t2d in bool, unless D is V."""
    maps = 0 if table.draft_vocab == vocab_size else 8 * table.draft_vocab + vocab_size
    return 2 * Network.of(table).all + maps


def training_state_bytes(table: ParameterTable) -> int:
    """state.safetensors: of what trains, float32 weights and AdamW's two moments."""
    return 12 * table.trainable


def fixed_memory(
    table: ParameterTable,
    dtype: Dtype,
    hot: bool,
    sharers: int = 1,
    head_products: HeadProducts = "dtype",
) -> dict[str, int]:
    """Held from the first step to the last, on every GPU; of what is shared, by so many, a part."""
    network = Network.of(table)
    # The target's whole head: its softmax and argmax are over V (loss.TargetHead).
    embedding, norm = (
        next(tensor for tensor in table.tensors if tensor.name == name)
        for name in ("target embedding", "target final norm")
    )
    parts = {
        "weights, float32": -(-4 * network.all // sharers),
        "AdamW's moments, float32": -(-8 * network.trained // sharers),
        "target's embedding and head": BYTES[dtype] * (2 * embedding.parameters + norm.parameters),
    }
    if hot:
        # hot.products.Stack
        parts["weights, bfloat16 copies"] = 2 * network.matrices
    if head_products == "float8":
        # hot.float8.Float8Head: by row and by column, with float32 scales, instead of bfloat16
        rows, width = network.head
        parts["weights, bfloat16 copies"] -= 2 * rows * width
        parts["head, two float8 copies"] = 2 * rows * width + 4 * (rows + width)
    return parts


def gradient_bytes(table: ParameterTable) -> int:
    """float32 gradients of all that trains (hot.products.add_gradient).

    Each process makes whole ones of its micro-batches; shared are their sums.
    """
    return 4 * table.trainable


def plain_memory(table: ParameterTable, dtype: Dtype, sharers: int) -> dict[str, int]:
    """What the plain path holds besides states and logits, which nobody measured."""
    parts = fixed_memory(table, dtype, False, sharers)
    parts["gradients, float32"] = gradient_bytes(table)
    if sharers > 1:
        # fully_shard gathers all weights before a micro-batch, and adds its gradient to the part.
        parts["weights, gathered"] = 4 * Network.of(table).all
        parts["gradients, float32"] += -(-gradient_bytes(table) // sharers)
    return parts


def hot_peak(table: ParameterTable, shape: DraftShape, work: Work) -> dict[str, int]:
    """What the hot path (bfloat16 on a GPU) holds at its fullest moment, part by part."""
    fixed = fixed_memory(table, "bfloat16", True, work.sharers, work.head_products)
    # aux and last of every token in bfloat16, its id in int64 and its mask (ttt.Batch)
    fixed["batches, this step's and the next's"] = (
        work.held * work.tokens * (2 * 4 * shape.hidden_size + 9)
    )
    moments = (
        _scoring(table, shape, work),
        _in_backward(table, shape, work),
        _in_update(table, work),
    )
    return fixed | max(moments, key=lambda parts: sum(parts.values()))


def _in_update(table: ParameterTable, work: Work) -> dict[str, int]:
    """Clipping and AdamW; before, sums of gradients are parted one by one (sharded.Sharded)."""
    gradients = gradient_bytes(table)
    parts = -(-gradients // work.sharers) if work.sharers > 1 else 0
    return {"gradients, float32": gradients + parts}


def _kept(shape: DraftShape, work: Work) -> dict[str, int]:
    """From the forward pass on, until a step's own backward pass."""
    h, _, q, c = _widths(shape)
    n, s = work.tokens, work.ttt_steps
    # hot.step.First: features, their norm, the embedding's, W_e e of q, k, v; keys and values.
    first = 3 * h + (q + 2 * c) + 2 * c
    return {
        "states kept for backward": 2 * n * (first + s * (_of_step(shape, work) + 2 * c)),
        "states scored by the head": 2 * n * s * 3 * h,
        "target's probabilities": 2 * n * shape.draft_vocab,
    }


def _of_step(shape: DraftShape, work: Work) -> int:
    """Numbers a row that a step frees in its backward pass.

    Its state; queries, and attention's output as laid out. Its keys and values are links of the
    chain, which end with the batch.
    """
    h, _, q, _ = _widths(shape)
    return h + 2 * q + (0 if work.recompute else _again(shape))


def _again(shape: DraftShape) -> int:
    """Numbers a row that a step keeps too, or else computes again.

    The norm of its state; attention's output as rows; the sum with the residual and its norm; gate
    and up side by side; their product.
    """
    h, i, q, _ = _widths(shape)
    return h + q + 2 * h + 2 * i + i


def _scoring(table: ParameterTable, shape: DraftShape, work: Work) -> dict[str, int]:
    """hot.head.score, before any step's backward pass: the last chunk of logits.

    With a trained head in float8, after it: the product that makes its weight's gradient.
    """
    network = Network.of(table)
    columns, width = network.head
    rows = work.tokens * work.ttt_steps
    gradients, head = gradient_bytes(table), 4 * columns * width
    if work.accumulate == 1:
        gradients = head if network.head_trained else 0
    parts = _kept(shape, work) | {"gradients, float32": gradients}
    logits = min(DRAFT_LOGITS_AT_ONCE, rows * columns)
    if work.head_products == "dtype":
        return parts | {"logits": 2 * logits}
    if not network.head_trained:
        # Their gradient is held beside them.
        return parts | {"logits": 3 * logits}
    # hot.float8.WeightGradient: the gradients of all logits in a byte each, and the states with
    # their weights, in bfloat16 and in float8.
    return parts | {
        "gradients of logits, float8": min(TURNED_AT_ONCE, rows * columns),
        "states, weighted": 3 * min(rows, TURNED_AT_ONCE // columns) * width,
    }


def _in_backward(table: ParameterTable, shape: DraftShape, work: Work) -> dict[str, int]:
    """The MLP of the last step but one: the layer's gradients are there, one step's states gone."""
    h, i, q, c = _widths(shape)
    n, s = work.tokens, work.ttt_steps
    gradients = gradient_bytes(table)
    if work.accumulate == 1:
        gradients -= 4 * 3 * h * h  # fc's comes last
    kept = _kept(shape, work)
    if s > 1:
        kept["states kept for backward"] -= 2 * n * _of_step(shape, work)
    if work.recompute:
        kept["states of the step computed again"] = 2 * n * (_again(shape) - h)
    # The head's norm has gone backward, and with it what it read: all steps' states.
    kept["states scored by the head"] -= 2 * n * s * h
    # chain.Chains: of step 0's keys and values in float32, of the links; meet.Fed: of W_e e; of all
    # states before the head's norm; and of this MLP's two inputs, its product, gate and up.
    numbers = 2 * 2 * c + (s - 1) * 2 * c + (q + 2 * c) + s * h + (2 * h + i + 2 * i)
    return kept | {
        "gradients, float32": gradients,
        "gradients of states": 2 * n * numbers,
    }


def _widths(shape: DraftShape) -> tuple[int, int, int, int]:
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return shape.hidden_size, shape.intermediate_size, queries, keys
