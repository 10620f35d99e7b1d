"""What can go wrong around a stage, besides what the library itself refuses."""

from eagle3.errors import Eagle3Error


class StageFailed(Eagle3Error):
    """A stage ended without its result; the message has the stage's own last word."""


class ServerError(Eagle3Error):
    """A Prefect or MLflow server that the environment names does not answer."""


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, so that nothing on the way to the end swallows it."""
