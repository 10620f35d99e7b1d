"""An S3 server on a free port of 127.0.0.1, and the variables by which it is found."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

KEY, SECRET = "AKIATESTONLY0000TEST", "a-secret-that-must-be-nowhere"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's; skips the test where it or s3fs is not installed."""
    server = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' runs these tests")
    pytest.importorskip("s3fs", reason="pip install 'eagle3[s3]' runs these tests")
    local = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    local.start()
    host, port = local.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables
    local.stop()
