"""Prove a drafter's folder against the whole contract, and name every line that it breaks.

The reader is independent of what writes checkpoints: plain JSON, a safetensors reader of its own,
numpy. A folder in the layout of another trainer gets its layout named, not twenty missing tensors.

Letters: D draft vocabulary, V target vocabulary.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.artifacts import Drafter, file_sha256
from eagle3.check_config import IMPORT, config_faults, sizes_are_usable
from eagle3.check_head import head_faults
from eagle3.contract import (
    CONFIG_FILE,
    HEADER_DTYPES,
    WEIGHTS_FILE,
    TensorSpec,
    is_speculators,
    plain_name,
    plain_view,
    tensor_table,
)
from eagle3.errors import CheckpointError
from eagle3.fault import Fault
from eagle3.layouts import PICKLES, map_side_files, other_weight_files
from eagle3.target_facts import TargetFacts, read_target
from eagle3.weights_file import FLOATS, WeightsFile

MAPS = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"


def check_drafter(folder: Path, target: Path | None) -> tuple[Fault, ...]:
    """Name every fault of a drafter's folder; none means that engines load it as it was trained.

    `target` is the target's folder (a `target` stage's, or a Hugging Face one): with it, sizes,
    layer ids and the head's rows are proven against the target's.

    Raises:
        CheckpointError: there is no such folder.
        TargetError: the target's folder is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name one that holds {CONFIG_FILE}")
    facts = None if target is None else read_target(target)
    return tuple(_faults(folder, facts))


def _faults(folder: Path, target: TargetFacts | None) -> Iterator[Fault]:
    config = _read_config(folder)
    if isinstance(config, Fault):
        yield config
    else:
        yield from config_faults(config, target, _trained_as(folder))
    if not (folder / WEIGHTS_FILE).is_file():
        yield _no_weights(folder)
        return
    try:
        weights = WeightsFile(folder / WEIGHTS_FILE)
    except CheckpointError as error:
        yield Fault(WEIGHTS_FILE, f"cannot be read: {error}", "copy or export the file again")
        return
    yield from _record(folder)
    if isinstance(config, Fault) or not sizes_are_usable(plain_view(config)):
        yield Fault(
            WEIGHTS_FILE, "is not checked: config.json does not say its sizes", "mend config.json"
        )
        return
    yield from _tensors(folder, weights, config, target)


def _read_config(folder: Path) -> dict[str, Any] | Fault:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except FileNotFoundError:
        return Fault(CONFIG_FILE, "is missing", "copy it from where the drafter was trained")
    except ValueError as error:
        return Fault(CONFIG_FILE, f"is not JSON: {error}", "copy or export the file again")
    if not isinstance(config, dict):
        return Fault(CONFIG_FILE, "holds no JSON object", "copy or export the file again")
    return config


def _no_weights(folder: Path) -> Fault:
    others = other_weight_files(folder)
    if others and others[0].suffix in PICKLES:
        return Fault(
            others[0].name, f"is a pickle, which can run code; {WEIGHTS_FILE} is missing", IMPORT
        )
    if others:
        names = ", ".join(path.name for path in others)
        return Fault(WEIGHTS_FILE, f"is missing; the weights are in {names}", IMPORT)
    return Fault(WEIGHTS_FILE, "is missing", "copy it from where the drafter was trained")


def _trained_as(folder: Path) -> dict[str, Any] | None:
    """The `drafter` section of our record; None without a record, empty where it is damaged."""
    path = folder / Drafter.manifest
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text())["params"]["drafter"])
    except (ValueError, KeyError, TypeError):
        # `_record` names the damage.
        return {}


def _record(folder: Path) -> Iterator[Fault]:
    path = folder / Drafter.manifest
    if not path.is_file():
        return
    try:
        recorded = json.loads(path.read_text()).get("sha256")
    except (ValueError, AttributeError) as error:
        yield Fault(path.name, f"is not our record: {error}", "run `dvc repro train` again")
        return
    if recorded != file_sha256(folder / WEIGHTS_FILE):
        yield Fault(
            WEIGHTS_FILE,
            f"is not the file that {path.name} records: it was changed after training",
            f"restore it (`dvc checkout {folder}`), or delete {path.name} if the change is meant",
        )


def _tensors(
    folder: Path, weights: WeightsFile, config: Mapping[str, Any], target: TargetFacts | None
) -> Iterator[Fault]:
    table = tensor_table(plain_view(config))
    names = {name: name for name in weights.entries}
    if is_speculators(config):
        names = {plain_name(name): name for name in weights.entries}
    elif any(plain_name(name) != name for name in names):
        renamed = [name for name in names if plain_name(name) != name]
        yield Fault(
            f"{WEIGHTS_FILE}: {renamed[0]}",
            f"and {len(renamed) - 1} more are named in another layout; the plain format says "
            f"{plain_name(renamed[0])}",
            IMPORT,
        )
        names = {plain_name(name): name for name in weights.entries}
    yield from _names(folder, names, table)
    sound = set()
    for name in sorted(table.keys() & names.keys()):
        faults = list(_values(weights, names[name], table[name]))
        yield from faults
        if not faults:
            sound.add(name)
    yield from _maps_and_head(weights, names, sound, table, target)


def _names(folder: Path, names: dict[str, str], table: dict[str, TensorSpec]) -> Iterator[Fault]:
    for name in sorted(names.keys() - table.keys()):
        what, fix = "is not in the contract", "leave it out; engines ignore it, silently"
        if name == EMBEDDING:
            what, fix = "is embedded: engines share the target's", IMPORT
        elif name in MAPS:
            what, fix = "is there, but the vocabulary is the whole one", "leave d2t and t2d out"
        yield Fault(f"{WEIGHTS_FILE}: {names[name]}", what, fix)
    side_files = map_side_files(folder)
    for name in sorted(table.keys() - names.keys()):
        what, fix = "is missing: engines leave it at random, silently", "export the drafter again"
        if name in MAPS:
            what, fix = "is missing: draft ids then mean the first target ids", IMPORT
            if side_files:
                what = f"is in a side file ({side_files[0].name}), which no engine reads"
        yield Fault(f"{WEIGHTS_FILE}: {name}", what, fix)


def _values(weights: WeightsFile, name: str, spec: TensorSpec) -> Iterator[Fault]:
    where, entry = f"{WEIGHTS_FILE}: {name}", weights.entries[name]
    if entry.shape != spec.shape:
        hint = ", its transpose" if entry.shape == spec.shape[::-1] else ""
        yield Fault(
            where,
            f"has shape {list(entry.shape)}{hint}; config.json makes it {list(spec.shape)}",
            "mend the sizes in config.json, or export the drafter again",
        )
    if entry.dtype != HEADER_DTYPES[spec.dtype]:
        yield Fault(where, f"is {entry.dtype}; it must be {HEADER_DTYPES[spec.dtype]}", IMPORT)
    if bad := weights.non_finite(name):
        yield Fault(where, f"has {bad} values that are not finite", "train or export it again")
    elif name != "lm_head.weight" and entry.dtype in FLOATS and not weights.raw(name).any():
        yield Fault(where, "is all zero", "export the trained weights again")
    elif len(entry.shape) > 1 and entry.dtype in FLOATS and _is_constant(weights.raw(name)):
        yield Fault(where, "holds one value everywhere", "export the trained weights again")


def _is_constant(stored: NDArray[Any]) -> bool:
    first = stored.flat[0]
    return bool(first) and bool((stored == first).all())


def _maps_and_head(
    weights: WeightsFile,
    names: dict[str, str],
    sound: set[str],
    table: dict[str, TensorSpec],
    target: TargetFacts | None,
) -> Iterator[Fault]:
    ids_D: NDArray[np.int64] | None = np.arange(table["lm_head.weight"].shape[0])
    if "d2t" in table:
        ids_D = None
        if "d2t" in sound:
            d2t_D = np.asarray(weights.raw(names["d2t"]))
            t2d_V = np.asarray(weights.raw(names["t2d"])) if "t2d" in sound else None
            faults = list(_maps(d2t_D, t2d_V, table["t2d"].shape[0]))
            yield from faults
            ids_D = None if faults else np.arange(len(d2t_D)) + d2t_D
    if "lm_head.weight" in sound:
        name = names["lm_head.weight"]
        # Without sound maps the rows have no known ids, so they are judged by themselves.
        known = target if ids_D is not None else None
        rows_DH = weights.floats(name, slice(None))
        ids = np.arange(len(rows_DH)) if ids_D is None else ids_D
        yield from head_faults(f"{WEIGHTS_FILE}: {name}", rows_DH, ids, known)


def _maps(d2t_D: NDArray[np.int64], t2d_V: NDArray[np.bool_] | None, vocab: int) -> Iterator[Fault]:
    where = f"{WEIGHTS_FILE}: d2t"
    ids_D = np.arange(len(d2t_D)) + d2t_D
    kept = None if t2d_V is None else np.flatnonzero(t2d_V)
    if looks_absolute(d2t_D, kept, vocab):
        yield Fault(where, "holds target ids; it must hold offsets, target id - draft id", IMPORT)
        return
    if (outside := ids_D[(ids_D < 0) | (ids_D >= vocab)]).size:
        yield Fault(
            where,
            f"points to {outside[0]} and {outside.size - 1} more ids outside 0..{vocab - 1}",
            "write the maps that the drafter was trained with",
        )
    if (drops := np.flatnonzero(np.diff(ids_D) <= 0)).size:
        yield Fault(
            where,
            f"does not rise: draft ids {drops[0]} and {drops[0] + 1} mean target ids "
            f"{ids_D[drops[0]]} and {ids_D[drops[0] + 1]}",
            IMPORT,
        )
    if kept is not None and not np.array_equal(kept, np.unique(ids_D)):
        only = np.setxor1d(kept, ids_D)
        yield Fault(
            f"{WEIGHTS_FILE}: t2d",
            f"keeps {len(kept)} ids and d2t {len(d2t_D)}, and they differ at {len(only)} (first: "
            f"target id {only[0] if len(only) else '-'})",
            "write the t2d that marks exactly the ids i + d2t[i]",
        )


def looks_absolute(d2t_D: NDArray[np.int64], kept: NDArray[np.int64] | None, vocab: int) -> bool:
    """Whether `d2t` holds target ids rather than offsets; `kept` are the ids that t2d marks."""
    if not d2t_D.any() or len(np.unique(d2t_D)) != len(d2t_D):
        # Offsets repeat wherever neighbouring target ids are kept; ids never do.
        return False
    if kept is not None and np.array_equal(kept, np.sort(d2t_D)):
        return True
    ids_D = np.arange(len(d2t_D)) + d2t_D
    return bool(d2t_D.min() >= 0 and d2t_D.max() < vocab) and bool((ids_D >= vocab).any())
