"""The shipped pipeline, whole, by `dvc repro`, with answers and hidden states from a real vLLM.

Once with a server of each stage's own, and once with one that all stages share and states that are
captured while it answers.
"""

import csv
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chain_project import ROOT, Chain, make_chain, plain_environment, scale_down
from servable_target import HEAD_DIM, servable_target
from tiny_params import tiny_params_tree

from eagle3.artifacts import HELD_OUT, SPLITS, Corpus, Drafter, HiddenStates, TargetModel
from eagle3.check import check_drafter
from eagle3.config import TargetParams
from eagle3.engines.base import Sampling
from eagle3.engines.server import PYTHON_VARIABLE, find_engine
from eagle3.engines.shared import running
from eagle3.engines.transformers import TransformersEngine
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore

STAGES = [
    *("target", "corpus", "extract", "vocab@full", "train@full", "evaluate@full"),
    *("serve@full", "compare"),
]
EAGLE3 = ("python", "-c", "from eagle3.cli import main; main()")


def make_project(folder: Path, model: Path, **extract: Any) -> Chain:
    params = scale_down(yaml.safe_load((ROOT / "params.yaml").read_text()), model)
    params["corpus"]["answers"]["backend"] = "vllm"
    params["extract"] |= {"backend": "vllm", **extract}
    params["drafter"]["head_dim"] = HEAD_DIM
    params["train"] |= {"total_steps": 60, "learning_rate": 5e-3}
    environ = plain_environment() | {PYTHON_VARIABLE: str(find_engine().python.absolute())}
    return make_chain(folder, params, environ)


Project = tuple[Chain, list[str]]
"""A project, and the stages that its first `dvc repro` ran."""


@pytest.fixture(scope="module")
def model(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that vLLM can serve on a CPU."""
    return servable_target(tiny_target, tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def projects(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Project]]:
    """Both, after `dvc repro`; the one that shares a server captures states, too."""
    own = make_project(tmp_path_factory.mktemp("own"), model)
    shared = make_project(tmp_path_factory.mktemp("shared"), model, capture_answers=True)
    # Side by side: for most of the time a stage, or a server that starts, keeps one core busy.
    with ThreadPoolExecutor() as pool:
        ran_own = pool.submit(own.repro)
        shared.run("dvc", "repro", "target")
        shared.run(*EAGLE3, "engine", "start")
        try:
            ran_shared = shared.repro()
            yield {"own": (own, ran_own.result()), "shared": (shared, ran_shared)}
        finally:
            shared.run(*EAGLE3, "engine", "stop")


@pytest.fixture
def own(projects: dict[str, Project]) -> Project:
    return projects["own"]


@pytest.fixture
def shared(projects: dict[str, Project]) -> Project:
    return projects["shared"]


@pytest.fixture(params=["own", "shared"])
def done(
    request: pytest.FixtureRequest, projects: dict[str, Project], monkeypatch: pytest.MonkeyPatch
) -> Chain:
    """Either project; its folder is the current one."""
    chain, _ = projects[request.param]
    monkeypatch.chdir(chain.folder)
    return chain


@pytest.fixture
def reference(done: Chain, model: Path) -> TransformersEngine:
    params = TargetParams.model_validate(tiny_params_tree(model)["target"])
    return TransformersEngine(TargetModel.load(TargetModel.home), params)


def test_every_stage_runs_once_with_a_server_for_each_of_two(own):
    chain, ran = own

    assert sorted(ran) == sorted(STAGES)
    logs = sorted(path.name for path in (chain.folder / ".work").glob("vllm-*.log"))
    assert logs == ["vllm-corpus.log", "vllm-extract.log"]
    assert chain.repro() == []


def test_every_stage_runs_once_with_one_server_for_both(shared):
    chain, ran = shared

    assert sorted([*ran, "target"]) == sorted(STAGES)
    assert list((chain.folder / ".work").glob("vllm-*.log")) == []
    server = running(chain.folder / ".engine")
    assert server is not None
    assert list((chain.folder / ".engine/states").iterdir()) == []
    assert chain.repro() == []


def test_states_that_were_captured_are_taken_and_the_engine_says_so(own, shared):
    names = [
        HiddenStates.load(chain.folder / HiddenStates.home).engine for chain, _ in (own, shared)
    ]

    assert names[0].startswith("vllm 0.")
    assert names[1] == f"{names[0]}, answers as they were written"
    assert list((shared[0].folder / ".work").glob("captured-*")) == []


def test_held_out_answers_are_the_greedy_ones_of_transformers(done, reference):
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=12, seed=0)
    for split in HELD_OUT:
        rows = load_rows(Corpus.home / f"{split}.zarr")
        spans = [rows.span(row) for row in range(len(rows))]
        masks = [rows.loss_mask_N[span] for span in spans]
        texts = [rows.tokens_N[span] for span in spans]
        prompts = [text[~mask].tolist() for text, mask in zip(texts, masks, strict=True)]
        answers = [text[mask].tolist() for text, mask in zip(texts, masks, strict=True)]

        assert answers == reference.generate(prompts, greedy)


def test_states_are_those_of_transformers_within_the_rounding_at_rest(done, reference):
    # Half a unit in the last of bfloat16's eight bits; eval is float32 at rest.
    tolerance = {"train": 2**-8, "validation": 2**-8, "eval": 1e-4}
    for split in SPLITS:
        rows = load_rows(Corpus.home / f"{split}.zarr")
        spans = [rows.span(row) for row in range(len(rows))]
        expected = reference.states([rows.tokens_N[span].tolist() for span in spans])
        aux_N3H, last_NH = StateStore.open(HiddenStates.home / f"{split}.zarr").read_spans(spans)

        for found, own in (
            (aux_N3H, torch.cat([row.aux_T3H for row in expected])),
            (last_NH, torch.cat([row.last_TH for row in expected])),
        ):
            torch.testing.assert_close(found.float(), own, rtol=tolerance[split], atol=1e-3)


def test_the_drafter_learns_and_keeps_the_contract(done):
    with Drafter.curve_home("full").open() as file:
        losses = [float(point["loss"]) for point in csv.DictReader(file) if point["loss"]]
    figures = json.loads(Path("reports/metrics/evaluate@full.json").read_text())

    assert losses[-1] < 0.9 * losses[0]
    assert figures["acceptance_length_k3"] > 1
    # Replay reads the stored states; the real loop runs the target in transformers.
    assert figures["loop_replay_disagreements"] == 0
    assert check_drafter(Drafter.home("full"), TargetModel.home) == ()
