"""What a person does in Prefect's UI, done in a browser."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.browser

SECONDS = 60


def click(browser, selector: str, text: str) -> None:
    """Click the last visible button of that text, once it is there."""

    def shown(_browser):
        buttons = browser.find_elements(By.CSS_SELECTOR, selector)
        return [button for button in buttons if button.text == text and button.is_displayed()]

    WebDriverWait(browser, SECONDS).until(shown)[-1].click()


def test_retry_clicked_in_the_ui_reruns_what_failed(deployment, first_run, browser):
    deployment.set_rate(-3)
    run = deployment.start()
    deployment.wait_for(run, "FAILED", "COMPLETED", "CRASHED")
    deployment.set_rate(3)

    browser.get(f"{deployment.api.removesuffix('/api')}/runs/flow-run/{run}")
    click(browser, "button", "Retry")
    click(browser, "button.p-button--default", "Retry")  # of the question whether we are sure

    assert deployment.wait_for(run, "COMPLETED", "CRASHED")["type"] == "COMPLETED"
    states = deployment.task_states(run)
    # One row of tasks per attempt.
    assert states[-4:] == [
        ("first", "Unchanged"),
        ("second@1", "Ran"),
        ("second@full", "Ran"),
        ("last", "Ran"),
    ]
    assert ("second@1", "Failed") in states[:-4]
