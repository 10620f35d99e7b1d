"""States of a batch of text, kept while transformers writes it: of its prompts, and of each answer.

The prompts are padded on the left to one length; so are their states here, until rows are taken.

Shapes: B prompts, L longest prompt, S places (L and the longest answer), T tokens of one row, H
target width, R rows whose last token was not fed back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from eagle3.engines.base import RowStates

# Layers whose keys lie in order of the tokens, so that those of a text can be taken out. A sliding
# window or a recurrent state is neither.
PLAIN_LAYERS = (StaticLayer, DynamicLayer)


class TextStates:
    """The states of one batch, on the CPU, in the dtype the target runs in."""

    def __init__(self, aux_layers: Sequence[int], last_layer: int, places: int) -> None:
        self._aux_layers, self._last_layer, self._places = aux_layers, last_layer, places
        # Aux [B, S, 3, H] and last [B, S, H], once the first are there.
        self._held: tuple[Tensor, ...] = ()
        self._filled = 0

    @contextmanager
    def taken_from(self, decoder: nn.Module, states: Mapping[int, Tensor]) -> Iterator[None]:
        """Take what `capture_states` has put into `states` whenever the decoder has run."""
        hook = decoder.register_forward_hook(lambda *_: self._take(states))
        try:
            yield
        finally:
            hook.remove()

    def put_last(self, rows_R: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Add the state of one more token [R, 1, H] of some rows, behind all that was taken."""
        for held, found in zip(self._held, self._both(states), strict=True):
            held[rows_R, self._filled] = found[:, 0].cpu()

    def row(self, row: int, start: int, stop: int) -> RowStates:
        """The states of a row that lies at places [start, stop)."""
        aux_BS3H, last_BSH = self._held
        return RowStates(aux_BS3H[row, start:stop], last_BSH[row, start:stop])

    def _take(self, states: Mapping[int, Tensor]) -> None:
        both = self._both(states)
        # The whole batch at once: rows are views of it, so nothing is held twice. Places that no
        # answer reaches are not touched, and take no memory.
        self._held = self._held or tuple(_room(found, self._places) for found in both)
        here = slice(self._filled, self._filled + both[1].shape[1])
        for held, found in zip(self._held, both, strict=True):
            held[:, here] = found.cpu()
        self._filled = here.stop

    def _both(self, states: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        aux = torch.stack([states[layer] for layer in self._aux_layers], dim=2)
        return aux, states[self._last_layer]


@torch.no_grad()
def feed_last(
    decoder: nn.Module, cache: Any, text_BS: Tensor, mask_BL: Tensor, rows_R: Sequence[int]
) -> bool:
    """Run the last token of those rows of a text that end where it ends.

    Args:
        cache: keys and values of the whole batch, of all its tokens but the last.
        text_BS: prompts and answers, the prompts padded on the left.
        mask_BL: 0 on that padding.

    Returns:
        False, and nothing was run, if this target's cache does not hold tokens in their order.
    """
    layers = list(cache.layers)
    if any(type(layer) not in PLAIN_LAYERS for layer in layers):
        return False
    known = text_BS.shape[1] - 1
    # The static cache of the generation has no place left; and only these rows are wanted.
    parts = [(layer.keys[rows_R, :, :known], layer.values[rows_R, :, :known]) for layer in layers]
    mask_RL = mask_BL[rows_R]
    answer_RA = mask_RL.new_ones(len(rows_R), text_BS.shape[1] - mask_BL.shape[1])
    mask_RS = torch.cat([mask_RL, answer_RA], dim=1)
    decoder(
        input_ids=text_BS[rows_R, -1:],
        attention_mask=mask_RS,
        position_ids=mask_RS.sum(dim=1, keepdim=True) - 1,
        cache=DynamicCache(parts),
        use_cache=True,
    )
    return True


def _room(states_BT: Tensor, places: int) -> Tensor:
    shape = (states_BT.shape[0], places, *states_BT.shape[2:])
    return torch.empty(shape, dtype=states_BT.dtype)
