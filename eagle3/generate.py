"""The real loop: drafter and target generate together, each with its own KV cache, batch size one.

It shares no code with replay, which it checks: here the target runs step by step, its states are
those of these steps, and rejected drafts are taken out of both caches.

Shapes: N new tokens, H target width, V target vocabulary, D draft vocabulary.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle3.acceptance import Tally
from eagle3.drafter import DraftCache, DrafterNet
from eagle3.engines.transformers import capture_states
from eagle3.maps import VocabMaps


@dataclass(frozen=True)
class Draft:
    """One chain of drafted tokens and what became of it."""

    row: int
    """Position whose feature the chain began with: row t proposes tokens t + 2 and on."""
    proposed: tuple[int, ...]
    accepted: int
    gaps: tuple[float, ...]
    """Top-2 gap of the drafter's logits at each step, the first over the second."""


@dataclass(frozen=True)
class Generation:
    """One answer that drafter and target wrote together."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Top-2 gap of the target's logits at each token: below the rounding error, either may win."""
    drafts: list[Draft] = field(default_factory=list)

    def tally(self, k: int, in_draft_V: Tensor) -> Tally:
        """Count the drafts as `acceptance.tally_answer` counts replayed ones.

        The first draft begins at the last prompt position, which places every other draft.
        """
        oov_misses = 0
        for draft in self.drafts:
            missed = draft.row + 1 - self.drafts[0].row + draft.accepted
            if draft.accepted < k and missed < len(self.tokens):
                oov_misses += not bool(in_draft_V[self.tokens[missed]])
        accepted_at = tuple(sum(draft.accepted > i for draft in self.drafts) for i in range(k))
        return Tally(k, len(self.drafts), accepted_at, oov_misses)


class TargetDecoder:
    """The target over one growing sequence."""

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self.model = model
        self.aux_layers = tuple(aux_layers)
        self.cache = DynamicCache()
        # transformers 5.17 says `past_key_values`, 5.24 `cache`; each swallows the other's name.
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append N tokens: logits [N, V] in float32 and aux states [N, 3, H] of each."""
        ids_1N = torch.tensor([list(tokens)], device=self.model.device)
        with capture_states(self.model, self.aux_layers) as captured:
            given = {self._cache_name: self.cache, "use_cache": True}
            logits_1NV = self.model(input_ids=ids_1N, **given).logits
        aux_N3H = torch.stack([captured[layer][0] for layer in self.aux_layers], dim=1)
        return logits_1NV[0].float(), aux_N3H

    def forget(self, count: int) -> None:
        """Take the last `count` tokens out of the cache."""
        length = self.length - count
        # A negative number is what to remove, in every version of transformers that we allow.
        if count:
            self.cache.crop(-count)
        assert self.length == length, "this target's cache cannot be rolled back"


class DraftDecoder:
    """The drafter over one growing sequence."""

    def __init__(self, net: DrafterNet, embedding_VH: Tensor, maps: VocabMaps) -> None:
        self.net = net
        self.embedding_VH = embedding_VH
        self.ids_D = maps.ids_D.to(embedding_VH.device)
        self.cache = DraftCache.empty(net.shape, like=embedding_VH)

    def append(self, next_tokens: Sequence[int], aux_N3H: Tensor) -> Tensor:
        """Add rows of known features, each with the token after it; the last row's state [1, H]."""
        features_NH = self.net.fuse(aux_N3H.to(self.embedding_VH))
        return self.step(next_tokens, features_NH)[-1:]

    def step(self, tokens: Sequence[int], hidden_NH: Tensor) -> Tensor:
        """Run the layer on N rows at the next positions; their K and V go into the cache."""
        device = self.embedding_VH.device
        positions_N = torch.arange(
            self.cache.length, self.cache.length + len(tokens), device=device
        )
        embeddings_NH = self.embedding_VH[torch.tensor(list(tokens), device=device)]
        return self.net.decode(embeddings_NH, hidden_NH, positions_N, self.cache)

    def pick(self, hidden_1H: Tensor) -> tuple[int, Tensor]:
        """The likeliest token, as a target id, and the logits [D] that say so."""
        logits_D = self.net.logits(hidden_1H)[0]
        return int(self.ids_D[logits_D.argmax()]), logits_D

    def draft(
        self, next_tokens: Sequence[int], aux_N3H: Tensor, k: int
    ) -> tuple[list[int], list[float]]:
        """Append what the target has confirmed, then draft k tokens: their target ids and gaps."""
        hidden_1H = self.append(next_tokens, aux_N3H)
        known = self.cache.length
        picks = [self.pick(hidden_1H)]
        while len(picks) < k:
            # No feature exists of a token that the target has not seen: the own state stands in.
            hidden_1H = self.step([picks[-1][0]], hidden_1H)
            picks.append(self.pick(hidden_1H))
        self.cache.truncate(known)
        return [token for token, _ in picks], [top2_gap(logits_D) for _, logits_D in picks]


def top2_gap(logits_V: Tensor) -> float:
    """Lead of the largest logit over the second."""
    first, second = logits_V.float().topk(2).values.tolist()
    return first - second


@torch.inference_mode()
def speculate(
    target: TargetDecoder,
    drafter: DraftDecoder,
    prompt: Sequence[int],
    limit: int,
    k: int,
    end_tokens: Collection[int],
) -> Generation:
    """Answer a prompt greedily with drafts of k tokens, up to an end token or `limit` tokens.

    Drafted tokens past the end of the answer do not count as accepted.
    """
    logits_NV, aux_N3H = target.step(prompt)
    first = int(logits_NV[-1].argmax())
    answer = Generation([first], [top2_gap(logits_NV[-1])])
    unseen = [*prompt[1:], first]
    while len(answer.tokens) < limit and answer.tokens[-1] not in end_tokens:
        proposed, gaps = drafter.draft(unseen, aux_N3H, k)
        logits_NV, aux_N3H = target.step([answer.tokens[-1], *proposed])
        chosen = logits_NV.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < k and proposed[accepted] == chosen[accepted]:
            accepted += 1
        target.forget(k - accepted)
        aux_N3H = aux_N3H[: accepted + 1]
        unseen = chosen[: accepted + 1]
        kept = _up_to_end(unseen, limit - len(answer.tokens), end_tokens)
        row = len(prompt) - 2 + len(answer.tokens)
        answer.drafts.append(Draft(row, tuple(proposed), min(accepted, len(kept)), tuple(gaps)))
        answer.tokens.extend(kept)
        answer.gaps.extend(top2_gap(logits_V) for logits_V in logits_NV[: len(kept)])
    return answer


@torch.inference_mode()
def decode_plainly(
    target: TargetDecoder, prompt: Sequence[int], limit: int, end_tokens: Collection[int]
) -> Generation:
    """Answer a prompt greedily, one target step per token, up to an end token or `limit` tokens."""
    answer = Generation()
    fed = list(prompt)
    while len(answer.tokens) < limit and (not answer.tokens or answer.tokens[-1] not in end_tokens):
        logits_V = target.step(fed)[0][-1]
        fed = [int(logits_V.argmax())]
        answer.tokens.extend(fed)
        answer.gaps.append(top2_gap(logits_V))
    return answer


def _up_to_end(tokens: list[int], room: int, end_tokens: Collection[int]) -> list[int]:
    for index, token in enumerate(tokens[:room]):
        if token in end_tokens:
            return tokens[: index + 1]
    return tokens[:room]
