"""`make demo`: the whole pipeline through Prefect, then the decision and where to look further."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from eagle3.errors import Eagle3Error
from tasks import signals
from tasks.errors import Terminated
from tasks.servers import own_environment, prefect_server

WHERE_TO_LOOK = """
reports/decision.md, reports/plots/   the decision, its reasons and its plots
make prefect                          the run, stage by stage, with Retry
make mlflow                           parameters and curves; tick two evaluate runs, Compare
dvc metrics show; dvc plots show      every figure by stage
"""


def demo() -> int:
    """Run the pipeline against one local Prefect server, or the one that PREFECT_API_URL names."""
    if os.environ.get("PREFECT_API_URL"):
        return _run_pipeline(own_environment())
    sys.stderr.write("starting a local Prefect server for this run\n")
    with prefect_server() as server:
        return _run_pipeline(server.environ)


def _run_pipeline(environ: Mapping[str, str]) -> int:
    process = subprocess.Popen([sys.executable, "-m", "flows.pipeline"], env=dict(environ))
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    signals.raise_on_sigterm()
    try:
        code = demo()
    except Eagle3Error as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, Terminated):
        sys.exit("error: interrupted; finished work is kept, run the same command to go on")
    if code == 0:
        subprocess.run([Path(sys.executable).with_name("eagle3"), "report"], check=True)
        sys.stdout.write(WHERE_TO_LOOK)
    sys.exit(code)
