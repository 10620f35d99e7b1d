"""The parameter table: what a drafter trains, and what it holds frozen, from shapes alone.

Letters: H target width, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from math import prod

from eagle3.config import Params, VocabSize, draft_vocab_size
from eagle3.contract import draft_config, tensor_table
from eagle3.errors import ParamsError

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorCount:
    """One tensor that training holds."""

    name: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def parameters(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True)
class ParameterTable:
    """Every tensor that training a drafter holds in memory, the target's own included."""

    draft_vocab: int
    tensors: tuple[TensorCount, ...]

    @property
    def trainable(self) -> int:
        """Parameters that the optimizer moves: fc, layer, norms, and the head unless frozen."""
        return sum(tensor.parameters for tensor in self.tensors if tensor.trainable)

    @property
    def frozen(self) -> int:
        """Parameters that are the target's: embedding, the head's D rows, final norm."""
        return sum(tensor.parameters for tensor in self.tensors if not tensor.trainable)

    @property
    def total(self) -> int:
        """Both."""
        return self.trainable + self.frozen


def parameter_table(params: Params, size: VocabSize) -> ParameterTable:
    """Count the parameters of a drafter of one draft vocabulary; nothing is allocated.

    A target that ties embedding and head is counted as if it did not: the loss reads D rows of the
    head as a tensor of their own. A frozen draft head (`train.head`) is those rows: counted once.

    Raises:
        ParamsError: the draft vocabulary does not fit the target's.
    """
    shape = params.target.shape
    if size != "full" and size >= shape.vocab_size:
        raise ParamsError(
            f"draft vocabulary {size} must be below the target's {shape.vocab_size} "
            "(target.shape.vocab_size); take a smaller one, or full"
        )
    draft_vocab = draft_vocab_size(size, shape.vocab_size)
    config = draft_config(
        # Ids do not change a count; the target stage checks the real ones.
        aux_layers=(),
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab,
        **params.drafter.model_dump(),
    )
    trained = [
        TensorCount(name, spec.shape, trainable=True)
        for name, spec in tensor_table(config).items()
        # d2t and t2d are maps, not parameters.
        if spec.dtype == "bfloat16" and not (params.train.head == "frozen" and name == HEAD)
    ]
    rows = HEAD if params.train.head == "frozen" else "target head, draft rows"
    frozen = [
        TensorCount("target embedding", (shape.vocab_size, shape.hidden_size), trainable=False),
        TensorCount(rows, (draft_vocab, shape.hidden_size), trainable=False),
        TensorCount("target final norm", (shape.hidden_size,), trainable=False),
    ]
    return ParameterTable(draft_vocab, (*trained, *frozen))
