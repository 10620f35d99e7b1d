"""params.yaml as YAML reads it, and what is said of it when it is changed for the worse."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.config import PARAMS_FILE, check_params
from eagle3.errors import ParamsError

ROOT = Path(__file__).parents[1]


def raw_params() -> dict[str, Any]:
    """Free to be changed."""
    return yaml.safe_load((ROOT / PARAMS_FILE).read_text())


def assert_refused(raw: dict[str, Any], match: str) -> None:
    with pytest.raises(ParamsError, match=match):
        check_params(raw, "params.yaml")
