"""The process around a stage: what `python -m flows.<stage>` does before and after its flow.

Checks all params, opens the MLflow run, runs the flow (under Prefect if there is a server), writes
the stage's metrics, and turns every end into an exit code and, where a user can mend it, one plain
line. Exit codes: 0 done, 1 refused or failed, 2 bad params, 130 Ctrl-C, 143 terminated.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.artifacts import Artifact, write_atomically
from eagle3.config import Params, VocabSize, draft_vocab_size, load_params, parse_size
from eagle3.errors import Eagle3Error, ParamsError
from eagle3.work import room_for
from tasks import dvc_stage, signals
from tasks.errors import Terminated
from tasks.prefect_lazy import PREFECT_ON, FlowRun
from tasks.rank import HELPS, RANK
from tasks.tracking import StageRun, stage_run

log = logging.getLogger(__name__)

WHOLE_CHAIN = "evaluate"
"""The stage whose MLflow run has all params: two of them side by side tell the whole difference."""

SHARED = "train"
"""The stage that several processes can share."""


def run_stage(stage: str, flow: Callable[..., Artifact]) -> None:
    """Run the flow of a stage that exists once, as dvc.yaml does; ends the process."""
    sys.exit(_exit_code(stage, flow, None))


def run_sized_stage(stage: str, flow: Callable[..., Artifact]) -> None:
    """Run the flow of a stage for the size that the command line has; ends the process."""
    usage = f"usage: python -m flows.{stage} SIZE, where SIZE is a number of tokens or full"
    if len(sys.argv) != 2:
        sys.stderr.write(usage + "\n")
        sys.exit(2)
    sys.exit(_exit_code(stage, flow, sys.argv[1]))


def _exit_code(stage: str, flow: Callable[..., Artifact], size_text: str | None) -> int:
    if HELPS:
        return _helped(stage, flow, size_text)
    _log_to_stderr()
    signals.die_with_parent()
    signals.raise_on_sigterm()
    try:
        size = None if size_text is None else parse_size(size_text)
        _track_and_run(stage, flow, load_params(), size)
    except Eagle3Error as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ParamsError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(
            "error: interrupted; finished work is kept, run the same command to go on\n"
        )
        return 130
    except Terminated:
        sys.stderr.write(
            "error: terminated; finished work is kept, run the same command to go on\n"
        )
        return 143
    return 0


def _helped(stage: str, flow: Callable[..., Artifact], size_text: str | None) -> int:
    """Compute for the process of RANK 0, which tracks, reports and writes."""
    signals.end_with_parent()
    try:
        if stage != SHARED or size_text is None:
            raise ParamsError(f"{stage} is one process (RANK is {RANK}); start it without torchrun")
        flow(params=load_params(), size=parse_size(size_text))
    except Eagle3Error as error:
        # Not a line that starts with "error:", which is the leader's to say.
        sys.stderr.write(f"process {RANK}: {error}\n")
        return 2 if isinstance(error, ParamsError) else 1
    return 0


def _log_to_stderr() -> None:
    # Beside Prefect's handlers, which are there already and send the same lines to its server.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("eagle3", "tasks"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def _track_and_run(
    stage: str, flow: Callable[..., Artifact], params: Params, size: VocabSize | None
) -> None:
    name = stage if size is None else f"{stage}@{size}"
    if not PREFECT_ON:
        log.info("%s: no PREFECT_API_URL, so this stage runs without Prefect", name)
    arguments = {"params": params} if size is None else {"params": params, "size": size}
    run_flow = FlowRun(name, flow, arguments)
    lineage = dvc_stage.lineage(name)
    tags = {"prefect.flow_run_id": run_flow.id, "prefect.task_run_id": run_flow.parent}
    with (
        room_for(f"the results of {name}", Path.cwd()),
        stage_run(name, tags | lineage.input_tags(), watch_system=True) as run,
    ):
        run.log_params(_params_of(params, None if stage == WHOLE_CHAIN else lineage.params))
        if size is not None:
            full = params.target.shape.vocab_size
            run.log_params({"draft_vocab": draft_vocab_size(size, full)})
            run.tag({"draft_vocab": str(draft_vocab_size(size, full))})
        artifact = run_flow()
        _write_results(name, artifact, run)
        # Hashing outs here costs nothing twice: DVC keeps what it learns about unchanged files.
        run.tag(lineage.output_tags())


def _write_results(name: str, artifact: Artifact, run: StageRun) -> None:
    figures = artifact.figures
    run.log_figures(figures)
    write_atomically(Path(f"reports/metrics/{name}.json"), json.dumps(figures, indent=2) + "\n")
    # DVC restores this file with the result, so a reused stage still names the run that made it.
    write_atomically(Path(f"runs/{name}.json"), json.dumps({"mlflow_run_id": run.id}) + "\n")


def _params_of(params: Params, keys: tuple[str, ...] | None) -> dict[str, Any]:
    """The values under the dotted `keys` by their names in params.yaml; all of them for None."""
    tree = params.model_dump(mode="json")
    if keys is None:
        return tree
    chosen: dict[str, Any] = {}
    for key in keys:
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        chosen[key] = value
    return chosen
