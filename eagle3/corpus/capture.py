"""States of answers, put on disk while the target writes the answers.

Whoever extracts next takes them from there (eagle3/captured/take.py) instead of running the target
again. They are working material: small stores under `.work/`, each of some whole rows, made before
these count as answered, and removed once they are taken.

Shapes: n tokens of one store, T tokens of one row, H target width.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.artifacts import Split, TargetModel
from eagle3.captured.place import captured_dtype, captured_folder
from eagle3.config import ExtractParams, StateDtype
from eagle3.corpus.template import TokenRow
from eagle3.engines.base import LAST, CapturingEngine, RowStates, Sampling
from eagle3.store.layout import Header
from eagle3.store.refused import in_write_dtype
from eagle3.store.rows import Rows, rows_sha256
from eagle3.store.writer import StateWriter
from eagle3.work import room_for


@dataclass(frozen=True)
class CapturedRow:
    """A row of the corpus, and the states of its tokens."""

    row: TokenRow
    states: RowStates


class AnswerCapture:
    """Keeps the states of all rows that the target answers."""

    def __init__(
        self, target: TargetModel, engine: CapturingEngine, params: ExtractParams, max_length: int
    ) -> None:
        """`max_length`: tokens that the corpus cuts a row to."""
        self.engine, self.max_length = engine, max_length
        self._target, self._params = target, params
        self._folder = captured_folder(target, engine.name, params)

    def of(self, split: Split) -> "SplitCapture":
        """What answers the conversations of one split."""
        return SplitCapture(self, split)

    def write(self, split: Split, captured: Sequence[CapturedRow]) -> None:
        """Put the states of some rows on disk, durably; extraction runs what is no number again.

        Raises:
            DiskFullError: there is no room; the rows then do not count as answered.
        """
        dtype = captured_dtype(split, self._params)
        good = [one for one in captured if _are_numbers(dtype, one.states)]
        for some in _by_size(good, self._params.shard_tokens):
            rows = _rows([one.row for one in some])
            path = self._folder / split / f"{rows_sha256(rows)[:16]}.zarr"
            # A run that was killed before these answers counted may have left them, or a part.
            shutil.rmtree(path, ignore_errors=True)
            with room_for("states of answers", self._folder):
                writer = StateWriter(path, self._header(rows, dtype), rows)
                aux_n3H, last_nH = writer.buffers(0)
                for number, one in enumerate(some):
                    here = rows.span(number)
                    aux_n3H[here] = one.states.aux_T3H.to(aux_n3H.dtype)
                    last_nH[here] = one.states.last_TH.to(last_nH.dtype)
                writer.write(0, aux_n3H, last_nH)

    def _header(self, rows: Rows, dtype: StateDtype) -> Header:
        chunk = self._params.chunk_tokens
        return Header(
            target=self._target.source,
            target_fingerprint=self._target.fingerprint,
            rows_sha256=rows_sha256(rows),
            tokens=rows.num_tokens,
            rows=len(rows),
            hidden_size=self._target.hidden_size,
            aux_layers=self._target.aux_layers,
            last=LAST,
            dtype=dtype,
            engine=self.engine.name,
            chunk_tokens=chunk,
            shard_tokens=-(-rows.num_tokens // chunk) * chunk,
        )


class SplitCapture:
    """A `TargetEngine` that remembers the states of what it writes, until the rows are finished."""

    def __init__(self, capture: AnswerCapture, split: Split) -> None:
        self.name = capture.engine.name
        self._capture, self._split = capture, split
        self._states: dict[tuple[int, ...], RowStates] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """As the engine does, token for token."""
        answers, found = self._capture.engine.generate_with_states(prompts, sampling)
        # A conversation that goes on has the states of its beginning in those of its next answer.
        for known in list(self._states):
            if any(tuple(prompt[: len(known)]) == known for prompt in prompts):
                del self._states[known]
        for prompt, answer, states in zip(prompts, answers, found, strict=True):
            if states is not None:
                self._states[(*prompt, *answer)] = states
        return answers

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """As the engine gives them."""
        return self._capture.engine.states(rows)

    def keep(self, finished: Mapping[str, TokenRow]) -> None:
        """Write the states of finished rows; one that ends with a question has none of its end."""
        captured = []
        for row in finished.values():
            short = row.cut(self._capture.max_length)
            states = self._states_of(short.tokens)
            if states is not None and short.supervised:
                count = len(short.tokens)
                cut = RowStates(states.aux_T3H[:count], states.last_TH[:count])
                captured.append(CapturedRow(short, cut))
        self._capture.write(self._split, captured)
        self._states.clear()

    def _states_of(self, tokens: tuple[int, ...]) -> RowStates | None:
        """States of a text that begins with these tokens, or is these."""
        beginnings = (known for known in self._states if known[: len(tokens)] == tokens)
        known = next(beginnings, None)
        return None if known is None else self._states[known]


def _are_numbers(dtype: StateDtype, states: RowStates) -> bool:
    return in_write_dtype(dtype, states.aux_T3H, states.last_TH)[2] is None


def _by_size(captured: Sequence[CapturedRow], tokens: int) -> Iterator[list[CapturedRow]]:
    """Rows in their order, together while they have fewer than so many tokens."""
    some: list[CapturedRow] = []
    size = 0
    for one in captured:
        some.append(one)
        size += len(one.row.tokens)
        if size >= tokens:
            yield some
            some, size = [], 0
    if some:
        yield some


def _rows(rows: Sequence[TokenRow]) -> Rows:
    """Rows as the stores keep them; here they are known by their tokens."""
    return Rows(
        tokens_N=np.concatenate([np.array(row.tokens, np.int32) for row in rows]),
        loss_mask_N=np.concatenate([np.array(row.loss_mask, np.bool_) for row in rows]),
        offsets_R1=np.cumsum([0, *(len(row.tokens) for row in rows)], dtype=np.int64),
        domains=("",) * len(rows),
        row_ids=tuple(str(number) for number in range(len(rows))),
    )
