"""dvc.yaml says of every stage what its flow, its task and its code say."""

import ast
import inspect
from pathlib import Path

import pytest

from eagle3 import artifacts

STAGES = ("target", "corpus", "extract", "vocab", "train", "evaluate", "serve", "compare")
SIZE = "${item.size}"

# Every stage needs these; they hold names and errors, not work, and a new field must not rerun all.
NOT_WORK = {
    f"eagle3/{name}.py"
    for name in (
        *("config", "sections", "extract_section", "model_sections"),
        *("errors", "records", "artifacts", "unfinished"),
        *("comparison", "progress", "work"),
    )
}

# What starts a vLLM server depends on what is loaded into it, which no import of ours shows.
STARTS_VLLM = "eagle3/engines/server.py"
INSIDE_VLLM = "eagle3/engines/inside_vllm"

CURVES_BESIDE = {
    "vocab": ["reports/coverage/${item.size}.csv"],
    "train": ["reports/training/${item.size}.csv"],
}
DECISION = ("acceptance.csv", "decision.json", "decision.md", "plots")


def home_of(name: str, sized: bool) -> str:
    """Where the record called `name` lies, as dvc.yaml writes it."""
    home = getattr(artifacts, name).home
    if isinstance(home, Path):
        return str(home)
    return str(home(SIZE)) if sized else str(home("x").parent)


def flow_of(root: Path, stage: str) -> ast.FunctionDef:
    tree = ast.parse((root / "flows" / f"{stage}.py").read_text())
    (flow,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return flow


def loaded_by(flow: ast.FunctionDef) -> set[str]:
    """Names of the records that a flow loads."""
    return {
        node.func.value.id
        for node in ast.walk(flow)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load"
        and isinstance(node.func.value, ast.Name)
    }


def returned_by(flow: ast.FunctionDef) -> str:
    assert isinstance(flow.returns, ast.Name)
    return flow.returns.id


def test_dvc_yaml_has_the_stages_and_each_has_its_flow_and_task(root, dvc_stages):
    assert tuple(dvc_stages) == STAGES
    for stage in STAGES:
        assert (root / "flows" / f"{stage}.py").exists()
        assert (root / "tasks" / f"{stage}.py").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_its_flow(root, dvc_stages, stage):
    sized = "matrix" in dvc_stages[stage]
    command = f"exec python -m flows.{stage}"
    assert dvc_stages[stage]["cmd"] == (f"{command} {SIZE}" if sized else command)
    flow = flow_of(root, stage)
    assert flow.name == f"{stage}_flow"
    parameters = [argument.arg for argument in flow.args.args]
    assert parameters == (["params", "size"] if sized else ["params"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_what_its_flow_loads(root, dvc_stages, stage):
    sized = "matrix" in dvc_stages[stage]
    loaded = {home_of(name, sized) for name in loaded_by(flow_of(root, stage))}
    read = {dep for dep in dvc_stages[stage]["deps"] if not dep.endswith(".py")}
    beyond_records = {"corpus": {"chats"}, "compare": {"reports/coverage"}}
    assert read == loaded | beyond_records.get(stage, set())


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_writes_what_its_flow_returns(root, dvc_stages, stage):
    sized = "matrix" in dvc_stages[stage]
    made = returned_by(flow_of(root, stage))
    outs = dvc_stages[stage]["outs"]
    if stage == "compare":  # its folder, reports/, holds other stages' results too
        assert outs == [f"reports/{name}" for name in DECISION]
    else:
        assert outs == [home_of(made, sized), *CURVES_BESIDE.get(stage, [])]
    assert getattr(artifacts, made).stage == stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_its_figures_and_its_mlflow_run_as_metrics(dvc_stages, stage):
    name = f"{stage}@{SIZE}" if "matrix" in dvc_stages[stage] else stage
    assert dvc_stages[stage]["metrics"] == [f"reports/metrics/{name}.json", f"runs/{name}.json"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_all_the_code_that_it_runs_and_no_other(
    imports, root, dvc_stages, stage
):
    """After an import was added or removed, put the right-hand list into dvc.yaml."""
    closure = imports.closure(root / "tasks" / f"{stage}.py")
    names = {str(path.relative_to(root)) for path in closure}
    runs = {
        name
        for name in names - NOT_WORK
        if name.startswith("eagle3/") and not name.endswith("__init__.py")
    }
    if STARTS_VLLM in runs:
        inside = (root / INSIDE_VLLM).glob("eagle3_*.py")
        runs |= {str(path.relative_to(root)) for path in inside}
    listed = [dep for dep in dvc_stages[stage]["deps"] if dep.endswith(".py")]
    assert listed == sorted(runs)


def test_every_record_is_made_by_a_stage(dvc_stages):
    records = [
        kind
        for _, kind in inspect.getmembers(artifacts, inspect.isclass)
        if issubclass(kind, artifacts.Artifact) and kind is not artifacts.Artifact
    ]
    assert {kind.stage for kind in records} == set(dvc_stages)
