"""Two drafters side by side in MLflow's UI, seen in a browser."""

import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tasks.servers import mlflow_server

pytestmark = pytest.mark.browser


def test_both_sizes_are_compared_by_draft_vocab_and_acceptance(
    chain, second_size, browser, monkeypatch
):
    monkeypatch.setenv("DVC_ROOT", str(chain.folder))
    records = [chain.folder / f"runs/evaluate@{size}.json" for size in (288, "full")]
    runs = [json.loads(record.read_text())["mlflow_run_id"] for record in records]
    with mlflow_server() as server:
        browser.get(f"{server.url}/#/compare-runs?runs={json.dumps(runs)}&experiments=[%221%22]")

        def page_shows_both(_browser) -> bool:
            text = browser.find_element(By.TAG_NAME, "body").text
            wanted = ("evaluate@288", "evaluate@full", "draft_vocab", "acceptance_length_k3")
            return all(word in text for word in wanted)

        WebDriverWait(browser, 60).until(page_shows_both)
