"""The extract stage as a process, with its states in a bucket: what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from s3_server import KEY, SECRET, TestBucket, files_of, s3_server
from tiny_corpus import save_corpus

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import Params
from eagle3.target import bring_target
from tasks import tracking

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def test_mlflow_has_the_bucket_and_neither_it_nor_any_file_or_log_has_credentials(
    project: Path, tiny_params: Params
) -> None:
    params = tiny_params.model_dump(mode="json")
    params["extract"]["store"] = "s3://states/stage"
    Path("params.yaml").write_text(yaml.safe_dump(params))
    target = bring_target(tiny_params.target, TargetModel.home)
    save_corpus(target, {"train": [20], "validation": [5], "eval": [7]}).save(Corpus.home)
    with s3_server():
        bucket = TestBucket()
        done = subprocess.run(
            [sys.executable, "-m", "flows.extract"], capture_output=True, text=True, check=False
        )
        there = bucket.content("stage")

    assert done.returncode == 0, done.stderr
    assert "in s3://states/stage" in done.stderr
    client, experiment = tracking.client()
    [recorded] = client.search_runs([experiment])
    assert recorded.data.params["extract.store"] == "s3://states/stage"
    pointer = json.loads(Path("data/hidden_states/train.zarr/remote.json").read_text())
    assert pointer["url"].startswith("s3://states/stage/train-")
    kept = {**files_of(project), **there, "log": (done.stdout + done.stderr).encode()}
    assert {"mlflow.db", "runs/extract.json", "data/hidden_states/manifest.json"} <= set(kept)
    for credential in (KEY, SECRET):
        assert [name for name, text in kept.items() if credential.encode() in text] == []
