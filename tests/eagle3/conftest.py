"""params.yaml to be changed; and two processes that train together beside one that trains alone."""

from typing import Any

import pytest
from raw_params import raw_params
from teams import Runs, in_one_process, with_train

from eagle3.config import Params


@pytest.fixture
def raw() -> dict[str, Any]:
    """params.yaml as YAML reads it, free to be changed."""
    return raw_params()


@pytest.fixture(scope="module")
def done() -> list[Runs]:
    """Both runs of a file, once its first test has made them."""
    return []


@pytest.fixture
def runs(
    done: list[Runs],
    request: pytest.FixtureRequest,
    tiny_params: Params,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """Both runs; the file's run_two starts the two processes. Their folder is the current one."""
    if not done:
        params = with_train(tiny_params, accumulate=2, batch_tokens=128)
        done.append(in_one_process(params, tmp_path_factory.mktemp("one"), monkeypatch))
        monkeypatch.chdir(done[0].two)
        request.module.run_two(done[0])
    monkeypatch.chdir(done[0].two)
    return done[0]
