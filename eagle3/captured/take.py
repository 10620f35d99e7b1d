"""An engine that takes states from what was captured, and runs the target over the rest.

A row is taken if its token ids are those of a captured one, all of them; whatever is missing,
unfinished or damaged there is run again.

Shapes: T tokens of one row.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from eagle3.artifacts import SPLITS, Corpus, TargetModel
from eagle3.captured.place import captured_dtype, captured_folder
from eagle3.config import ExtractParams, StateDtype
from eagle3.engines.base import RowStates, Sampling, TargetEngine
from eagle3.errors import StoreError
from eagle3.store.layout import token_ids_sha256
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where the states of a captured row lie."""

    store: Path
    span: slice


@contextmanager
def captured_first(
    target: TargetModel, engine: TargetEngine, params: ExtractParams
) -> Iterator[TargetEngine]:
    """The engine for the corpus at hand, captured states first; they are removed at a good end."""
    folder = captured_folder(target, engine.name, params)
    places = find_captured(folder, params)
    yield CapturedFirst(engine, places) if places else engine
    shutil.rmtree(folder)


class CapturedFirst:
    """A `TargetEngine` over captured states and another engine."""

    def __init__(self, engine: TargetEngine, places: Mapping[str, Place]) -> None:
        self._engine, self._places = engine, places
        # A store says so: its states depend, within rounding, on the batches of the answers.
        self.name = f"{engine.name}, answers as they were written"

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """As the engine does."""
        return self._engine.generate(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Captured ones in the dtype that they were kept in, others as the engine gives them."""
        found = {number: self._take(row) for number, row in enumerate(rows)}
        missing = [number for number, states in found.items() if states is None]
        if missing:
            run = self._engine.states([rows[number] for number in missing])
            found.update(zip(missing, run, strict=True))
        return [states for states in found.values() if states is not None]

    def _take(self, row: Sequence[int]) -> RowStates | None:
        place = self._places.get(_key(np.array(row)))
        if place is None:
            return None
        try:
            return RowStates(*_open(place.store).read(place.span.start, place.span.stop))
        except StoreError as error:
            log.warning("captured states are damaged, their rows are run again: %s", error)
            return None


def find_captured(folder: Path, params: ExtractParams) -> dict[str, Place]:
    """Places of the corpus's rows, by their token ids, as far as they were captured."""
    wanted: dict[str, StateDtype] = {}
    tokens: dict[str, int] = {}
    for split in SPLITS:
        rows = load_rows(Corpus.home / f"{split}.zarr")
        for number in range(len(rows)):
            ids_T = rows.tokens_N[rows.span(number)]
            # The same tokens in another split, too: eval comes last, and asks for most.
            wanted[_key(ids_T)] = captured_dtype(split, params)
            tokens[_key(ids_T)] = len(ids_T)
    places: dict[str, Place] = {}
    for path in sorted(folder.glob("*/*.zarr")):
        places |= {
            key: place for key, place in _places_in(path, wanted).items() if key not in places
        }
    log.info(
        "%d of %d tokens have states that were captured while the target wrote",
        *(sum(tokens[key] for key in places), sum(tokens.values())),
    )
    return places


def _places_in(path: Path, wanted: Mapping[str, StateDtype]) -> dict[str, Place]:
    """Places in one store, of the rows that are wanted in its dtype."""
    try:
        store = StateStore.open(path)
        rows = store.rows
    except StoreError as error:
        log.info("captured states are unfinished or damaged, their rows are run again: %s", error)
        return {}
    spans = {_key(rows.tokens_N[rows.span(row)]): rows.span(row) for row in range(len(rows))}
    return {
        key: Place(path, span)
        for key, span in spans.items()
        if wanted.get(key) == store.header.dtype
    }


def _key(ids_T: np.ndarray) -> str:
    return token_ids_sha256(ids_T)


@lru_cache(maxsize=8)
def _open(path: Path) -> StateStore:
    """A store, kept open for a while: each has its threads."""
    return StateStore.open(path)
