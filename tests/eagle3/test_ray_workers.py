"""Distributed extraction: the bytes of one process, whoever dies on the way."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from killers import Killer, KillerAtBoth
from listeners import Listener
from poisoned import poison
from s3_server import TestBucket, s3_server
from tiny_corpus import save_corpus

from eagle3.artifacts import SPLITS, Corpus, HiddenStates, Split, TargetModel
from eagle3.config import ExtractParams, TargetParams
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import EngineError, StoreError
from eagle3.extract import extract_by, extract_hidden_states
from eagle3.progress import Reporter
from eagle3.ray_worker import ExtractWorker, WorkerJob
from eagle3.ray_workers import ray_workers
from eagle3.store.rows import load_rows
from eagle3.target import bring_target
from tasks.extract import extract

PARAMS = ExtractParams(
    backend="transformers",
    state_dtype="bfloat16",
    eval_state_dtype="float32",
    chunk_tokens=4,
    shard_tokens=16,
    store=None,
    max_nonfinite_rows=0,
    workers=2,
    ray_address=None,
    keep=True,
    ahead_shards=1,
    capture_answers=False,
)
# 14, 2 and 2 shards; most rows of train lie across two.
LENGTHS: dict[Split, list[int]] = {
    "train": [5, 9, 6, 20, 3, 17, 40, 8, 24, 31, 12, 16, 33],
    "validation": [16, 5],
    "eval": [7, 14, 4],
}
TOKENS = 224 + 21 + 25
SHARDS = 14 + 2 + 2

# A cluster of its own process: the tests reach it by its address, as one that others started.
CLUSTER = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
while True:
    try:
        ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
        break
    except Exception as error:
        # Ray gives itself 30 s to start, which a busy machine may not have.
        if "timed out during startup" not in str(error):
            raise
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


Result = TypeVar("Result")

# Not importorskip: what Ray is to be told before its import, whoever uses it tells it.
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="pip install 'eagle3[ray]' runs this test"
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[TestBucket]:
    with s3_server():
        yield TestBucket()


@pytest.fixture(scope="module")
def cluster(bucket: TestBucket) -> Iterator[str]:
    """Its nodes have the variables by which the bucket is found."""
    # Ray asks of a cluster of its own for a token; who connects must be told so before its import.
    os.environ["RAY_AUTH_MODE"] = "token"
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        yield next(line for line in process.stdout if line.startswith("address")).split()[1]


@pytest.fixture
def target(
    tiny_target_params: TargetParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TargetModel:
    monkeypatch.chdir(tmp_path)
    return bring_target(tiny_target_params, TargetModel.home)


@pytest.fixture
def corpus(target: TargetModel) -> Corpus:
    return save_corpus(target, LENGTHS)


@pytest.fixture
def job(target: TargetModel, tiny_target_params: TargetParams) -> WorkerJob:
    return WorkerJob(
        folder=Path.cwd(),
        target=target,
        params=tiny_target_params,
        threads=torch.get_num_threads(),
    )


def extract_on_ray(
    job: WorkerJob,
    corpus: Corpus,
    address: str | None,
    out: Path,
    report: Reporter,
    count: int = PARAMS.workers,
    params: ExtractParams = PARAMS,
) -> HiddenStates:
    with ray_workers(job, count, address, "cpu") as workers:
        return extract_by(job.target, corpus, params, workers.engine, workers.fill, out, report)


def extract_here(
    job: WorkerJob, corpus: Corpus, out: Path, params: ExtractParams = PARAMS
) -> HiddenStates:
    engine = TransformersEngine(job.target, job.params)
    return extract_hidden_states(job.target, corpus, params, engine, out, Listener())


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def patiently(work: Callable[[], Result]) -> Result:
    """Do what starts Ray, which gives itself 30 s for it; a busy machine may not have them."""
    while True:
        try:
            return work()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise


@needs_ray
def test_ray_that_is_started_here_listens_on_this_machine_alone(job: WorkerJob) -> None:
    def addresses() -> set[str]:
        with ray_workers(job, 1, None, "cpu"):
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            return {
                one.laddr.ip
                for process in family
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            }

    found = {ip_address(address.removeprefix("::ffff:")) for address in patiently(addresses)}
    assert found
    assert all(address.is_loopback for address in found), found


@needs_ray
def test_two_workers_on_this_machine_write_the_bytes_of_one_process(
    job: WorkerJob, corpus: Corpus
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    shared = patiently(lambda: extract(job.target, corpus, PARAMS, job.params, Path("shared")))
    one = PARAMS.model_copy(update={"workers": 1})

    assert shared == extract(job.target, corpus, one, job.params, Path("alone"))
    assert files_of(Path("shared")) == files_of(Path("alone"))
    # Ray has its own, by which a terminated stage would not say so to MLflow.
    assert signal.getsignal(signal.SIGTERM) == handler


@needs_ray
def test_a_worker_killed_midway_loses_nothing_and_the_bytes_are_the_same(
    cluster: str, job: WorkerJob, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3")
    killer = Killer(caplog, all_of_them=False)
    shared = extract_on_ray(job, corpus, cluster, Path("shared"), killer)

    assert len(killer.killed) == 1
    assert re.search(r"Ray worker \d died, others take over", caplog.text)
    assert killer.steps[-1] == (TOKENS, TOKENS)
    assert killer.steps == sorted(killer.steps)
    assert shared == extract_here(job, corpus, Path("alone"))
    assert files_of(Path("shared")) == files_of(Path("alone"))


@needs_ray
def test_rows_that_two_workers_refuse_are_those_of_one_process_and_counted_by_the_driver(
    cluster: str, job: WorkerJob, corpus: Corpus
) -> None:
    rows = load_rows(Corpus.home / "train.zarr")
    # Of rows 5 (across two shards), 6 and 11, and of no row of another split.
    for number in (50, 66, 187):
        poison(job.target, token=int(rows.tokens_N[number]))
    two = PARAMS.model_copy(update={"max_nonfinite_rows": 2})
    with (
        pytest.raises(StoreError, match=r"3 rows of train .* allows 2: .*to 3 or more"),
        ray_workers(job, 2, cluster, "cpu") as workers,
    ):
        extract_by(
            *(job.target, corpus, two, workers.engine, workers.fill, Path("shared"), Listener())
        )
    enough = PARAMS.model_copy(update={"max_nonfinite_rows": 3})
    shared = extract_on_ray(job, corpus, cluster, Path("shared"), Listener(), params=enough)

    assert shared.refused_rows == {"train": 3, "validation": 0, "eval": 0}
    assert shared == extract_here(job, corpus, Path("alone"), enough)
    assert files_of(Path("shared")) == files_of(Path("alone"))


@needs_ray
def test_workers_put_their_shards_into_a_bucket_themselves(
    cluster: str, bucket: TestBucket, job: WorkerJob
) -> None:
    corpus = save_corpus(job.target, {"train": [20, 9, 11], "validation": [5], "eval": [7]})
    there = PARAMS.model_copy(update={"store": "s3://states/ray"})
    with ray_workers(job, 2, cluster, "cpu") as workers:
        shared = extract_by(
            *(job.target, corpus, there, workers.engine, workers.fill, Path("shared"), Listener())
        )

    assert shared == extract_here(job, corpus, Path("alone"))
    for split in SPLITS:
        [store] = {name.partition("/")[0] for name in bucket.content("ray") if split in name}
        assert bucket.content(f"ray/{store}") == files_of(Path("alone") / f"{split}.zarr")


@needs_ray
def test_a_worker_killed_while_it_writes_a_shard_and_makes_another_loses_both_to_the_rest(
    cluster: str,
    bucket: TestBucket,
    job: WorkerJob,
    corpus: Corpus,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "eagle3")
    there = PARAMS.model_copy(update={"store": "s3://states/killed"})
    listener = Listener()
    with KillerAtBoth.listening() as requests:
        requests.log, requests.shards = caplog, SHARDS
        shared = extract_on_ray(job, corpus, cluster, Path("shared"), listener, params=there)

    assert requests.made_meanwhile, "the target waits for the writer"
    assert caplog.text.count("died, others take over") == 1
    assert requests.asked("PUT", f"aux/c.{requests.written}.0.0.0") == 2
    for shard in (requests.written, requests.made):
        assert requests.asked("PUT", f"shards/{shard:05d}.json") == 1
    assert listener.steps[-1] == (TOKENS, TOKENS)
    assert shared == extract_here(job, corpus, Path("alone"))
    for split in SPLITS:
        [store] = {name.partition("/")[0] for name in bucket.content("killed") if split in name}
        assert bucket.content(f"killed/{store}") == files_of(Path("alone") / f"{split}.zarr")


def test_a_node_without_the_credentials_of_the_bucket_is_named(
    bucket: TestBucket, job: WorkerJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ExtractWorker()
    worker.open(job)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    with pytest.raises(
        EngineError, match=r"on Ray node .*s3://states/x.*; give credentials by AWS"
    ):
        worker.fill("s3://states/x", "train", 0, limit=0)


@needs_ray
def test_when_all_workers_die_the_next_run_goes_on_even_without_ray(
    cluster: str, job: WorkerJob, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "eagle3")
    with pytest.raises(EngineError, match=r"all 2 Ray workers died.*run `dvc repro extract`"):
        extract_on_ray(job, corpus, cluster, Path("states"), Killer(caplog, all_of_them=True))
    kept = [path.read_bytes() for path in Path(".work").rglob("shards/*.json")]
    resumed = extract_here(job, corpus, Path("states"))

    assert len(kept) >= 2
    assert resumed == extract_here(job, corpus, Path("alone"))
    assert files_of(Path("states")) == files_of(Path("alone"))


@needs_ray
def test_what_a_worker_refuses_is_said_as_by_one_process_and_the_shard_is_named(
    cluster: str, job: WorkerJob, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    poison(job.target, token=int(load_rows(Corpus.home / "eval.zarr").tokens_N[10]))

    with pytest.raises(StoreError, match=r"1 row of train .*: row row\d .*; set target.dtype"):
        extract_on_ray(job, corpus, cluster, Path("states"), Listener(), count=1)
    assert re.search(r"Ray worker 0 failed at shard \d+ of train", caplog.text)


@needs_ray
def test_a_node_without_the_projects_folder_is_named(
    cluster: str, job: WorkerJob, corpus: Corpus, tmp_path: Path
) -> None:
    elsewhere = WorkerJob(**{**vars(job), "folder": tmp_path / "elsewhere"})

    with pytest.raises(EngineError, match=r"has no folder .*elsewhere; put the project on a file"):
        extract_on_ray(elsewhere, corpus, cluster, Path("states"), Listener(), count=1)


def test_without_ray_the_extra_is_named(job: WorkerJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with (
        pytest.raises(EngineError, match=r"run `pip install 'eagle3\[ray\]'`, or set extract"),
        ray_workers(job, 2, None, "cpu"),
    ):
        pass
