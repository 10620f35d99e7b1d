"""The target run in this process by transformers: answers by its own sampling, states by hooks.

Shapes: B prompts or rows, L longest of them, T tokens of one row, H target width.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.text_states import TextStates, feed_last
from eagle3.errors import TargetError
from eagle3.target import end_token_ids, load_model
from eagle3.target.quiet import quiet_transformers


class TransformersEngine:
    """A `TargetEngine` on the CPU or one GPU; the model is loaded once, when it is made."""

    def __init__(
        self, target: TargetModel, params: TargetParams, home: Path = TargetModel.home
    ) -> None:
        self._aux_layers = target.aux_layers
        self._end_ids = sorted(end_token_ids(target, home))
        self._model = load_model(target, params, home)
        # Work of a killed run is continued by an engine of the same name, so by equal arithmetic.
        self.name = (
            f"transformers {transformers.__version__}, {params.dtype} on {self._model.device.type}"
        )
        # A model's own generation config may hold a repetition penalty or top-k: text from those
        # is not what the target says by its logits, which is what a drafter is accepted by.
        self._model.generation_config = transformers.GenerationConfig()
        self._last_layer = target.num_layers
        self._decoder = find_decoder(self._model)
        self.batches_rows = self._model.device.type == "cuda"

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each prompt; see `TargetEngine`. The prompts are one batch: B x L must fit."""
        if not prompts:
            return []
        ids_BL, mask_BL = _left_padded(prompts, self._end_ids[0], self._model.device)
        text = self._write(prompts, ids_BL, mask_BL, sampling)
        return self._answers(text.sequences, ids_BL.shape[1])

    def generate_with_states(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[list[list[int]], list[RowStates | None]]:
        """The answers of `generate`, with states; see `CapturingEngine`.

        All states of the batch are held in memory until the last of its rows is dropped.
        """
        if not prompts:
            return [], []
        ids_BL, mask_BL = _left_padded(prompts, self._end_ids[0], self._model.device)
        longest = ids_BL.shape[1]
        kept = TextStates(self._aux_layers, self._last_layer, longest + sampling.max_new_tokens)
        layers = (*self._aux_layers, self._last_layer)
        with capture_states(self._decoder, layers) as states:
            with kept.taken_from(self._decoder, states):
                text = self._write(prompts, ids_BL, mask_BL, sampling)
            answers = self._answers(text.sequences, longest)
            ended = [longest + len(answer) for answer in answers]
            # Rows that end with the batch: their last token was written, and not fed back.
            open_rows = [row for row, end in enumerate(ended) if end == text.sequences.shape[1]]
            fed = feed_last(self._decoder, text.cache, text.sequences, mask_BL, open_rows)
            if fed:
                kept.put_last(open_rows, states)
        return answers, [
            kept.row(row, longest - len(prompts[row]), end) if fed or row not in open_rows else None
            for row, end in enumerate(ended)
        ]

    def _write(
        self,
        prompts: Sequence[Sequence[int]],
        ids_BL: Tensor,
        mask_BL: Tensor,
        sampling: Sampling,
    ) -> Any:
        """What transformers makes of padded prompts: `sequences`, prompts included, and `cache`."""
        with quiet_transformers(), torch.no_grad(), _seeded(prompts, sampling, ids_BL.device):
            return self._model.generate(
                ids_BL,
                attention_mask=mask_BL,
                generation_config=self._generation_config(sampling),
            )

    def _answers(self, text_BS: Tensor, longest: int) -> list[list[int]]:
        return [_up_to_end(answer, self._end_ids) for answer in text_BS[:, longest:].tolist()]

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Hidden states of each row; see `TargetEngine`.

        On a CPU row by row, without padding: the states of a row then depend on nothing but the
        row, to the last bit. A GPU takes the rows as one batch: short rows alone leave it idle.
        """
        if not rows:
            return []
        batches = [list(rows)] if self.batches_rows else [[row] for row in rows]
        with torch.no_grad():
            return [states for batch in batches for states in self._states_of(batch)]

    def _states_of(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        ids_BL, mask_BL = _right_padded(rows, self._end_ids[0], self._model.device)
        layers = (*self._aux_layers, self._last_layer)
        # Rows of one length need no mask, and a masked kernel need not give the same bits.
        mask = None if bool(mask_BL.all()) else mask_BL
        # The decoder alone: nobody wants the logits, and SmolLM2's head is a fifth of its weights.
        with capture_states(self._decoder, layers) as states:
            self._decoder(input_ids=ids_BL, attention_mask=mask, use_cache=False)
        aux_BL3H = _on_host(torch.stack([states[layer] for layer in self._aux_layers], dim=2))
        last_BLH = _on_host(states[self._last_layer])
        return [
            RowStates(aux_BL3H[place, : len(row)], last_BLH[place, : len(row)])
            for place, row in enumerate(rows)
        ]

    def _generation_config(self, sampling: Sampling) -> transformers.GenerationConfig:
        common: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "eos_token_id": self._end_ids,
            "pad_token_id": self._end_ids[0],
            # The growing cache copies all keys and values at every token: 128 tokens of 64 rows of
            # SmolLM2 took 82 and 83 s of CPU with it, 72 and 77 s with this one, the same text.
            # Not compiled: every batch has its own shapes, and would be compiled anew.
            "cache_implementation": "static",
            "disable_compile": True,
            "return_dict_in_generate": True,
        }
        if sampling.temperature == 0:
            return transformers.GenerationConfig(do_sample=False, **common)
        return transformers.GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,  # transformers' own default cuts at 50
            **common,
        )


@contextmanager
def capture_states(model: nn.Module, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the residual stream after each of `layers`, [B, T, H], whenever the model runs.

    The state after k layers is what layer k reads, and after the last one what the final norm
    reads. transformers' own `hidden_states[n]` is after that norm, and so of no use.
    """
    decoder = find_decoder(model)
    readers = [*_children(decoder, "layers"), decoder.get_submodule("norm")]
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            states[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [
        readers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer in set(layers)
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def find_decoder(model: nn.Module) -> nn.Module:
    """The language model's layers and final norm, without head, wherever a wrapper has them.

    Raises:
        TargetError: no module of the model looks like it.
    """
    config: Any = model.config
    text = config.get_text_config()
    for module in model.modules():
        norm = getattr(module, "norm", None)
        widths = [tuple(p.shape) for p in norm.parameters()] if isinstance(norm, nn.Module) else []
        # A vision tower can have layers and a norm, too: of its own width.
        if widths == [(text.hidden_size,)] and _children(module, "layers"):
            return module
    raise TargetError(
        f"{type(model).__name__} has no module with decoder `layers` and a final `norm` of width "
        f"{text.hidden_size}; set target.source to another model"
    )


def _children(module: nn.Module, name: str) -> list[nn.Module]:
    found = getattr(module, name, None)
    return list(found) if isinstance(found, nn.ModuleList) else []


@contextmanager
def _seeded(
    prompts: Sequence[Sequence[int]], sampling: Sampling, device: torch.device
) -> Iterator[None]:
    """Seed torch from the seed and the prompts, so that a call can be repeated alone."""
    said = json.dumps([sampling.seed, [list(map(int, prompt)) for prompt in prompts]])
    seed = int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little") >> 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids_BL = torch.full((len(prompts), longest), pad)
    mask_BL = torch.zeros_like(ids_BL)
    for row, prompt in enumerate(prompts):
        assert len(prompt) > 0, "an empty prompt"
        ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BL[row, longest - len(prompt) :] = 1
    return ids_BL.to(device), mask_BL.to(device)


def _right_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Behind the rows: no token of a row sees the padding, and positions are the row's own."""
    longest = max(map(len, rows))
    ids_BL = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    lengths_B1 = torch.tensor([[len(row)] for row in rows])
    return ids_BL.to(device), (torch.arange(longest) < lengths_B1).long().to(device)


def _on_host(states: Tensor) -> Tensor:
    """A copy in memory that a GPU writes by itself; torch keeps that memory for the next one."""
    return torch.empty_like(states, device="cpu", pin_memory=states.is_cuda).copy_(states)


def _up_to_end(answer: list[int], end_ids: Sequence[int]) -> list[int]:
    """Cut the padding after the first end token, and keep that token."""
    ends = (place for place, token in enumerate(answer) if token in end_ids)
    return answer[: next(ends, len(answer)) + 1]
