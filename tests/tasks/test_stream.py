"""The train stage that makes states itself: terminated, and over states of other params."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_pipeline import Inputs, make_inputs
from tiny_pipeline import train as train_drafter

from eagle3.artifacts import Drafter
from eagle3.config import Params
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import ArtifactError
from tasks.train import train

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

SIZE = 128
TRAIN = [sys.executable, "-m", "flows.train", str(SIZE)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves what training reads, for the others."""
    return tmp_path_factory.mktemp("made") / "data"


@pytest.fixture
def streamed(tiny_params: Params, project: Path, made: Path) -> Params:
    """params.yaml of a run that keeps no states to train on, and everything that it reads."""
    extract = {"keep": False, "ahead_shards": 1, "chunk_tokens": 16, "shard_tokens": 64}
    train = {"log_every": 1, "validate_every": 10, "total_steps": 40}
    params = tiny_params.model_copy(
        update={
            "extract": tiny_params.extract.model_copy(update=extract),
            "train": tiny_params.train.model_copy(update=train),
        }
    )
    if not made.exists():
        make_inputs(params, SIZE)
        shutil.copytree("data", made)
    else:
        shutil.copytree(made, "data")
    write(params)
    return params


def write(params: Params) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    kept = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return kept | {"PYTHONPATH": root}


def test_a_terminated_stage_leaves_a_state_that_another_run_goes_on_from(
    streamed: Params, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    with subprocess.Popen(TRAIN, env=environment(), stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            said.append(line)
            if line.startswith("step 3:"):
                running.send_signal(signal.SIGTERM)
    assert running.returncode == 143, "".join(said)
    assert any("shards are made while training reads them" in line for line in said)
    assert list(Path(".work").glob("train-*/training/state.safetensors"))

    inputs = Inputs.load(SIZE)
    engine = TransformersEngine(inputs.target, streamed.target)
    with caplog.at_level("INFO", "eagle3"):
        drafter = train_drafter(inputs, streamed, engine=engine)
    assert "going on from step" in caplog.text
    assert drafter.draft_vocab == SIZE
    assert list(Path(".work").glob("train-*")) == []


def test_states_that_were_extracted_for_other_params_are_refused(streamed: Params) -> None:
    kept = streamed.extract.model_copy(update={"keep": True})
    params = streamed.model_copy(update={"extract": kept})
    inputs = Inputs.load(SIZE)
    given = (inputs.target, inputs.corpus, inputs.states, inputs.vocab)

    with pytest.raises(ArtifactError, match=r"extract.keep: true; run `dvc repro extract`, or set"):
        train(*given, params, Drafter.home(SIZE))
