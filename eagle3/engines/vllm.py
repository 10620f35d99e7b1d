"""The target run by vLLM: one server that answers prompts and gives hidden states, by token ids.

Shapes: T tokens of a row, L extracted layers (three aux layers and the last), H target width.
"""

import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import load_file
from torch import Tensor

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.served import in_parallel
from eagle3.engines.server import find_engine, running_server
from eagle3.engines.shared import RECORD, SHARED, Wanted, find_shared
from eagle3.engines.vllm_server import (
    AT_ONCE,
    VllmClient,
    extracted_layers,
    server_arguments,
    target_options,
)
from eagle3.errors import EngineError
from eagle3.target import end_token_ids
from eagle3.target.folder import trusted_folder

log = logging.getLogger(__name__)

URL_VARIABLE = "EAGLE3_VLLM_URL"
"""Address of a vLLM server that already runs, to be used instead of one of ours."""

ROWS_AT_ONCE = 8

# Read by Eagle3HiddenStates and the connector that it extends.
SAVE_STATES = {"eagle3_save_states": True}
SAVE_ANSWER_STATES = {**SAVE_STATES, "include_output_tokens": True, "eagle3_one_more": True}


class VllmEngine:
    """Runs the target in vLLM, for the corpus (continuous batching) and for extraction alike.

    The server is the one that `eagle3 engine start` keeps for the project, if it runs. Otherwise
    one starts at the first call and stops with `close`, or at the end of a `with`.
    Answers repeat for a seed as far as vLLM's batching allows: which prompts share a batch can move
    a logit in its last bits.
    """

    def __init__(
        self,
        target: TargetModel,
        params: TargetParams,
        longest: int,
        log_file: Path,
        home: Path = TargetModel.home,
    ) -> None:
        """`longest`: tokens of the longest prompt and its answer together."""
        self._target = target
        self._folder = trusted_folder(target, home)
        self._stop = end_token_ids(target, home)
        self._dtype = params.dtype
        self._longest = longest
        self._log_file = log_file
        self._layers = extracted_layers(target)
        self._open = ExitStack()
        self._running: VllmClient | None = None

    @property
    def name(self) -> str:
        """Engine and version, and the dtype the target runs in."""
        return f"{self._client.name}, {self._dtype}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server, if it is ours and runs."""
        self._running = None
        self._open.close()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each prompt; the end token is included where the target wrote one."""
        client = self._client
        return in_parallel(lambda prompt: client.answer(prompt, sampling), prompts, AT_ONCE)

    def generate_with_states(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[list[list[int]], list[RowStates | None]]:
        """The answers of `generate`, with states; see `CapturingEngine`.

        None from a server without our connector's `eagle3_one_more`, of rows that ended themselves.
        """
        client = self._client
        found = in_parallel(
            lambda prompt: self._answer_with_states(client, prompt, sampling), prompts, AT_ONCE
        )
        return [answer for answer, _ in found], [states for _, states in found]

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Hidden states of each row, in the dtype the target runs in, on the CPU."""
        client = self._client
        return in_parallel(lambda row: self._states_of(client, row), rows, ROWS_AT_ONCE)

    def _states_of(self, client: VllmClient, row: Sequence[int]) -> RowStates:
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1, seed=0)
        answer = client.complete(row, greedy, {"kv_transfer_params": SAVE_STATES})
        return self._saved(client, answer, row)

    def _answer_with_states(
        self, client: VllmClient, prompt: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], RowStates | None]:
        """One token more than the answer is written, and dropped: only then is its end read."""
        longer = replace(sampling, max_new_tokens=sampling.max_new_tokens + 1)
        answer = client.complete(prompt, longer, {"kv_transfer_params": SAVE_ANSWER_STATES})
        written = answer["choices"][0]["token_ids"]
        ends = (place + 1 for place, token in enumerate(written) if token in self._stop)
        count = min(next(ends, sampling.max_new_tokens), sampling.max_new_tokens)
        states = self._saved(client, answer, [*prompt, *written[:-1]])
        tokens = len(prompt) + count
        if len(states.last_TH) < tokens:
            return written[:count], None
        return written[:count], RowStates(states.aux_T3H[:tokens], states.last_TH[:tokens])

    def _saved(
        self, client: VllmClient, answer: dict[str, Any], tokens: Sequence[int]
    ) -> RowStates:
        """The states that came with an answer, which must be those of these tokens."""
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise EngineError(
                f"{client.http.url} gave no hidden states; unset {URL_VARIABLE} so that a server "
                "is started with the connector, or start yours with Eagle3HiddenStates"
            )
        states_TLH = read_states(Path(path), tokens)
        expected = (len(tokens), len(self._layers), self._target.hidden_size)
        if states_TLH.shape != expected:
            raise EngineError(
                f"{path} holds states of shape {tuple(states_TLH.shape)}, but tokens, layers and "
                f"width are {expected}; start the server with --no-enable-prefix-caching and "
                f"layers {self._layers}"
            )
        aux = [self._layers.index(layer) for layer in self._target.aux_layers]
        # The highest layer is the last state, before the final norm.
        return RowStates(states_TLH[:, aux], states_TLH[:, -1].contiguous())

    @property
    def _client(self) -> VllmClient:
        if self._running is None:
            self._running = VllmClient(self._server(), self._stop)
        return self._running

    def _server(self) -> HttpClient:
        if url := os.environ.get(URL_VARIABLE):
            return HttpClient(url)
        if shared := find_shared(Wanted.of(self._target, self._dtype, self._longest)):
            log.info("the target runs in the server of %s, at %s", SHARED / RECORD, shared.url)
            return HttpClient(shared.url)
        engine = find_engine()
        states = self._open.enter_context(tempfile.TemporaryDirectory(prefix="eagle3-states-"))
        options = target_options(
            self._target, self._folder, self._dtype, self._longest, Path(states)
        )
        return self._open.enter_context(
            running_server(engine, server_arguments(options, engine), self._log_file)
        )


def read_states(path: Path, row: Sequence[int]) -> Tensor:
    """Take the states that the connector wrote for a row [T, L, H], and remove its files.

    Raises:
        EngineError: the file holds the states of other tokens.
    """
    lock = path.with_name(f"{path.name}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        tensors = load_file(path)
    path.unlink()
    lock.unlink()
    if tensors["token_ids"].tolist() != list(row):
        raise EngineError(f"{path} holds the states of other tokens than the row that was sent")
    return tensors["hidden_states"]
