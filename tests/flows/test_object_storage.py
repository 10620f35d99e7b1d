"""States in a bucket: the same drafter, and no credentials in anything that is kept."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from s3_server import KEY, SECRET, s3_server


@pytest.fixture
def variables() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        import s3fs

        s3fs.S3FileSystem(use_listings_cache=False).mkdir("states")
        yield variables


def test_the_drafter_is_the_one_from_the_disk_and_credentials_are_nowhere(
    chain, chain_run, variables: dict[str, str], tmp_path: Path
):
    folder = tmp_path / "project"
    shutil.copytree(chain.folder, folder, symlinks=True)
    for name in ("models", "data/hidden_states", "mlartifacts"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "mlflow.db").unlink()
    params = yaml.safe_load((folder / "params.yaml").read_text())
    params["extract"]["store"] = "s3://states/tiny"
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    here = type(chain)(folder, chain.environ | variables)
    logs = [here.run("python", "-m", "flows.extract").stderr]
    logs.append(here.run("python", "-m", "flows.train", "full").stderr)

    model = Path("models/full/model.safetensors")
    assert (folder / model).read_bytes() == (chain.folder / model).read_bytes()
    assert "s3://states/tiny" in (folder / "data/hidden_states/manifest.json").read_text()
    assert not list(folder.glob("data/hidden_states/*.zarr/aux/c.*"))
    kept = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for credential in (KEY, SECRET):
        assert not any(credential.encode() in content for content in kept)
        assert not any(credential in log for log in logs)
    assert any(b"s3://states/tiny" in path.read_bytes() for path in folder.glob("mlflow.db*"))
