"""Replay: what a drafter would have drafted along a text that the target has already written.

The target is not run: its states were extracted. From each row the drafter drafts its own chain,
with its own tokens and states, exactly as it would in an engine that has accepted the text so far.

Shapes: T tokens of one row of the corpus, P rows that draft, K draft steps, H width, V target
vocabulary.
"""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from eagle3.acceptance import Tally, drafting_rows, supervised_spans, tally_answer
from eagle3.attention import Chain, Documents, attend_chain
from eagle3.drafter import DrafterNet
from eagle3.maps import VocabMaps
from eagle3.store.rows import Rows

log = logging.getLogger(__name__)

StateReader = Callable[[int, int], tuple[Tensor, Tensor]]
"""Reads tokens [start, stop) of a store: aux [n, 3, H] and last [n, H]."""


@torch.no_grad()
def draft_chains(
    net: DrafterNet,
    embedding_VH: Tensor,
    maps: VocabMaps,
    tokens_T: Tensor,
    aux_T3H: Tensor,
    rows_P: Tensor,
    steps: int,
) -> Tensor:
    """Draft a chain of `steps` tokens from each of the rows, greedily: target ids, int64 [P, K].

    Args:
        embedding_VH: the target's.
        tokens_T: int64. Row t is fed token t + 1, so rows lie below T - 1.
        aux_T3H: the target's three aux states at those tokens.
        rows_P: int64, ascending.
    """
    documents = Documents((0, len(tokens_T)))
    positions_T = torch.arange(len(tokens_T), device=embedding_VH.device)
    features_TH = net.fuse(aux_T3H)
    # The last token has no successor to be fed; its key lies after every row that drafts.
    fed_T = torch.cat([tokens_T[1:], tokens_T[-1:]])
    embedded_TQE = net.embedding_half(embedding_VH[fed_T])
    keys_TKE, values_TKE = net.key_value(embedded_TQE, features_TH, positions_T)
    ids_D = maps.ids_D.to(embedding_VH.device)
    state_PH, embedded_PQE, chain = features_TH[rows_P], embedded_TQE[rows_P], Chain([], [])
    drafted: list[Tensor] = []
    for step in range(steps):
        if step:
            embedded_PQE = net.embedding_half(embedding_VH[drafted[-1]])
            key_PKE, value_PKE = net.key_value(embedded_PQE, state_PH, rows_P + step)
            chain = Chain([*chain.keys, key_PKE], [*chain.values, value_PKE])
        query_PAE = net.query(embedded_PQE, state_PH, rows_P + step)
        attended_PAE = attend_chain(query_PAE, keys_TKE, values_TKE, chain, rows_P, documents)
        state_PH = net.finish(state_PH, attended_PAE)
        drafted.append(ids_D[net.logits(state_PH).argmax(dim=-1)])
    return torch.stack(drafted, dim=1)


def replay_rows(
    net: DrafterNet,
    embedding_VH: Tensor,
    maps: VocabMaps,
    rows: Rows,
    read: StateReader,
    ks: tuple[int, ...],
    which: Iterable[int],
) -> dict[int, dict[int, Tally]]:
    """Replay rows of the corpus at several draft lengths: row number -> k -> tally.

    One chain of the longest k serves all: a chain does not depend on where it ends.
    """
    in_draft_V = maps.t2d_V.cpu().numpy()
    device = embedding_VH.device
    tallies: dict[int, dict[int, Tally]] = {}
    for row in which:
        here = rows.span(row)
        tokens_T = rows.tokens_N[here].astype("int64")
        spans = supervised_spans(rows.loss_mask_N[here])
        tallies[row] = {k: Tally.empty(k) for k in ks}
        aux_T3H, _ = read(here.start, here.stop)
        for span in spans:
            rows_P = drafting_rows(span)
            if not len(rows_P):
                continue
            chains_PK = draft_chains(
                net,
                embedding_VH,
                maps,
                torch.from_numpy(tokens_T).to(device),
                aux_T3H.to(device, embedding_VH.dtype),
                torch.from_numpy(rows_P).to(device),
                max(ks),
            )
            for k in ks:
                tallies[row][k] += tally_answer(
                    chains_PK.cpu().numpy(), tokens_T, span, in_draft_V, k
                )
    return tallies
