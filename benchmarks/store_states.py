"""States for the benchmarks of the store: SmolLM2's own, and synthetic ones of Kimi-K2.5's shape.

Shapes: n tokens, H target width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.store.rows import Rows
from eagle3.store.states import StateStore

KIMI_WIDTH = 7168
# Tokens that are made; further ones are these in another order. A chunk never sees two of them
# twice, and compression does not look further than a chunk.
POOL = 4096


@dataclass(frozen=True)
class States:
    """A source of bfloat16 states."""

    name: str
    aux_n3H: Tensor
    last_nH: Tensor
    lengths: tuple[int, ...]
    """Of the rows, in tokens; their sum may be larger than n."""

    @property
    def width(self) -> int:
        """H."""
        return self.last_nH.shape[1]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return sum(self.lengths)

    @property
    def bytes_per_token(self) -> int:
        """As they are: 4 H values of 2 bytes."""
        return 4 * self.width * 2

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """States of tokens [start, stop) of the rows; past n they repeat, shuffled."""
        n = len(self.last_nH)
        if stop <= n:
            return self.aux_n3H[start:stop], self.last_nH[start:stop]
        orders = {}
        picked = []
        for token in range(start, stop):
            lap, place = divmod(token, n)
            if lap not in orders:
                orders[lap] = np.random.default_rng(lap).permutation(n)
            picked.append(orders[lap][place])
        index_n = torch.tensor(np.array(picked))
        return self.aux_n3H[index_n], self.last_nH[index_n]

    def rows(self) -> Rows:
        """Rows of these lengths; their tokens mean nothing."""
        return Rows(
            tokens_N=np.arange(self.tokens, dtype=np.int32),
            loss_mask_N=np.ones(self.tokens, np.bool_),
            offsets_R1=np.cumsum([0, *self.lengths], dtype=np.int64),
            domains=("benchmark",) * len(self.lengths),
            row_ids=tuple(f"row{row}" for row in range(len(self.lengths))),
        )


def real_states(path: Path) -> States:
    """All of a store that a demo has made."""
    store = StateStore.open(path)
    assert store.header.dtype == "bfloat16", "the benchmark compares bfloat16 states"
    lengths = np.diff(store.rows.offsets_R1).tolist()
    aux_n3H, last_nH = store.read(0, store.header.tokens)
    return States(f"real: {store.header.target}, {path.name}", aux_n3H, last_nH, tuple(lengths))


def kimi_shaped(decoded_gb: float, longest: int, pool: int = POOL) -> States:
    """Synthetic: normal, each channel and each token of its own size, a few channels far larger.

    Rows have 100 to `longest` tokens.
    """
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    channel_4H = torch.from_numpy(np.exp(draw.normal(0, 0.7, size=(4, KIMI_WIDTH)))).float()
    channel_4H[:, draw.choice(KIMI_WIDTH, 8, replace=False)] *= 100
    token_n = torch.from_numpy(np.exp(draw.normal(0, 0.3, size=pool))).float()
    all_n4H = torch.empty(pool, 4, KIMI_WIDTH, dtype=torch.bfloat16)
    for start in range(0, pool, 256):
        piece = slice(start, start + 256)
        all_n4H[piece] = torch.randn(256, 4, KIMI_WIDTH) * channel_4H * token_n[piece, None, None]
    wanted = round(decoded_gb * 1e9 / (4 * KIMI_WIDTH * 2))
    lengths: list[int] = []
    while (left := wanted - sum(lengths)) > 0:
        lengths.append(min(left, int(draw.integers(100, longest + 1))))
    name = "synthetic, Kimi-K2.5's shape"
    aux_n3H, last_nH = all_n4H[:, :3].contiguous(), all_n4H[:, 3].contiguous()
    return States(name, aux_n3H, last_nH, tuple(lengths))
