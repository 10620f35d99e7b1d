"""The stages up to a drafter with their states in a bucket: the same drafter as on the disk."""

from pathlib import Path

import pytest
from s3_server import KEY, SECRET, s3_server
from tiny_pipeline import make_inputs, train

from eagle3.config import Params


def test_the_drafter_is_the_one_from_the_disk_and_credentials_are_nowhere(
    tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = {}
    with s3_server():
        import s3fs

        s3fs.S3FileSystem(use_listings_cache=False).mkdir("states")
        for store in (None, "s3://states/tiny"):
            folder = tmp_path / ("disk" if store is None else "bucket")
            folder.mkdir()
            monkeypatch.chdir(folder)
            extract = tiny_params.extract.model_copy(update={"store": store})
            params = tiny_params.model_copy(update={"extract": extract})
            inputs = make_inputs(params, "full")
            train(inputs, params)
            assert inputs.states.url == store
            drafters[store] = Path("models/full/model.safetensors").read_bytes()

    assert len(set(drafters.values())) == 1
    assert not list(tmp_path.glob("bucket/data/hidden_states/*.zarr/aux/c.*"))
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for credential in (KEY, SECRET):
        assert not any(credential.encode() in content for content in kept)
