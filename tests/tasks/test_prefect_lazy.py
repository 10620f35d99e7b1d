"""Prefect only where a server is named."""

import logging
import subprocess
import sys

import pytest

from eagle3.errors import CorpusError
from tasks import prefect_lazy


@pytest.fixture
def without_server(monkeypatch):
    monkeypatch.setattr(prefect_lazy, "PREFECT_ON", False)


def test_without_a_server_flows_and_tasks_are_the_plain_functions(without_server):
    def work() -> int:
        return 1

    assert prefect_lazy.flow(name="work")(work) is work
    assert prefect_lazy.task(name="work", retries=2)(work) is work


def test_without_a_server_a_stage_does_not_even_import_prefect():
    code = (
        "import os, sys\n"
        "os.environ.pop('PREFECT_API_URL', None)\n"
        "import flows.compare\n"
        "print('prefect' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "key"), [("train@32000", "train-32000"), ("Progress: Answers ", "progress-answers")]
)
def test_artifact_keys_are_spelled_as_prefect_allows(name, key):
    assert prefect_lazy.artifact_key(name) == key


@pytest.mark.parametrize(("error", "traceback"), [(CorpusError, False), (ValueError, True)])
def test_only_errors_that_a_user_can_mend_are_logged_without_a_traceback(error, traceback, caplog):
    prefect_lazy.quieten_known_errors()
    logger = logging.getLogger("prefect.flow_runs")
    # Prefect may have set handlers up before; ours listens too.
    logger.addHandler(caplog.handler)
    try:
        raise error("chats.jsonl, line 3")
    except error:
        logger.exception("the flow failed")
    finally:
        logger.removeHandler(caplog.handler)
    assert bool(caplog.records[-1].exc_info) is traceback
