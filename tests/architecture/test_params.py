"""params.yaml, its types and what DVC tracks of it."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from eagle3.config import ExtractParams, Params, Section, load_params

# How extraction runs, not what it makes: another number of workers must not rerun it.
UNTRACKED = {f"extract.{key}" for key in ExtractParams.how_it_runs}


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and every model nested in its fields."""
    yield model
    for field in model.model_fields.values():
        waiting = [field.annotation]
        while waiting:
            kind = waiting.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind)
            waiting += get_args(kind)


ALL_SECTIONS = sorted(set(sections(Params)), key=lambda model: model.__name__)


def keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_no_config_field_has_a_default(section):
    assert [name for name, field in section.model_fields.items() if not field.is_required()] == []


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_section_is_frozen_and_closed(section):
    assert issubclass(section, Section)
    assert section.model_config["frozen"] is True
    assert section.model_config["extra"] == "forbid"


def test_the_shipped_params_are_valid(root):
    load_params(root / "params.yaml")


def test_every_key_of_params_that_decides_a_result_is_tracked_by_a_stage(root, dvc_stages):
    tracked = {key for stage in dvc_stages.values() for key in stage["params"]}
    params = yaml.safe_load((root / "params.yaml").read_text())
    forgotten = [
        leaf
        for leaf in leaves(params)
        if not any(leaf == key or leaf.startswith(f"{key}.") for key in tracked)
    ]
    assert set(forgotten) == UNTRACKED


def test_every_key_that_a_stage_tracks_is_in_params(root, dvc_stages):
    known = set(keys(yaml.safe_load((root / "params.yaml").read_text())))
    tracked = {key for stage in dvc_stages.values() for key in stage["params"]}
    assert tracked - known == set()


def test_stages_of_one_size_do_not_track_the_list_of_sizes(dvc_stages):
    sized = [stage for stage in dvc_stages.values() if "matrix" in stage]
    assert len(sized) == 4
    for stage in sized:
        assert "vocab" not in stage["params"]
        assert "vocab.sizes" not in stage["params"]
