"""Building the maps of a draft vocabulary: an index write against the list look-up in public use.

    python benchmarks/vocab_build.py

Prints one JSON object. Both ways run on a scaled-down problem, where their maps are compared; ours
then runs at the size of Kimi-K2.5, from tokens to maps.
"""

import json
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from eagle3.maps import VocabMaps
from eagle3.store.rows import Rows
from eagle3.vocab import build_draft_vocab, count_tokens

SMALL = {"target_vocab": 16_384, "draft_vocab": 3_200, "tokens": 200_000}
FULL = {"target_vocab": 163_840, "draft_vocab": 32_000, "tokens": 17_300_000}
KEPT = list(range(200))


def zipf_rows(target_vocab: int, tokens: int) -> Rows:
    """Answers whose token frequencies fall as words' do."""
    draw = np.random.default_rng(0)
    ranks = draw.random(tokens) ** 3 * target_vocab
    return Rows(
        tokens_N=draw.permutation(target_vocab).astype(np.int32)[ranks.astype(np.int64)],
        loss_mask_N=np.ones(tokens, np.bool_),
        offsets_R1=np.array([0, tokens]),
        domains=("chat",),
        row_ids=("row",),
    )


def by_index_write(rows: Rows, target_vocab: int, draft_vocab: int) -> VocabMaps:
    """As the vocab stage does it."""
    return build_draft_vocab(count_tokens(rows, target_vocab), draft_vocab, KEPT)


def by_list_lookup(rows: Rows, target_vocab: int, draft_vocab: int) -> VocabMaps:
    """As public trainers do it: `token in list` for every token of the target."""
    counts = Counter(rows.tokens_N.tolist())
    ranked = sorted(range(target_vocab), key=lambda token: (-counts[token], token))
    kept = set(KEPT)
    others = [token for token in ranked if token not in kept]
    ids = sorted([*KEPT, *others[: draft_vocab - len(KEPT)]])
    return VocabMaps(
        d2t_D=torch.tensor([id_ - place for place, id_ in enumerate(ids)]),
        t2d_V=torch.tensor([token in ids for token in range(target_vocab)]),
    )


def timed(
    build: Callable[[Rows, int, int], VocabMaps], rows: Rows, sizes: dict[str, int]
) -> tuple[float, VocabMaps]:
    """Seconds of one run, and what it built."""
    started = time.perf_counter()
    maps = build(rows, sizes["target_vocab"], sizes["draft_vocab"])
    return time.perf_counter() - started, maps


def main() -> None:
    """Time both ways and print."""
    rows = zipf_rows(SMALL["target_vocab"], SMALL["tokens"])
    timed(by_index_write, rows, SMALL)  # the first call of a process pays for torch's start
    index_s, ours = timed(by_index_write, rows, SMALL)
    lookup_s, theirs = timed(by_list_lookup, rows, SMALL)
    assert torch.equal(ours.d2t_D, theirs.d2t_D)
    assert torch.equal(ours.t2d_V, theirs.t2d_V)
    full_s, _ = timed(by_index_write, zipf_rows(FULL["target_vocab"], FULL["tokens"]), FULL)
    print(
        json.dumps(
            {
                "small": {
                    **SMALL,
                    "index_write_s": round(index_s, 5),
                    "list_lookup_s": round(lookup_s, 5),
                    "ratio": round(lookup_s / index_s, 1),
                },
                "full": {**FULL, "index_write_s": round(full_s, 4)},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
