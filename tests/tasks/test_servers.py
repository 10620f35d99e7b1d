"""Local servers: where they listen, and what is said when one does not start."""

import socket
import sys

import pytest

from tasks import servers
from tasks.errors import ServerError


def test_the_usual_port_is_taken_if_nobody_has_it():
    with socket.socket() as probe:
        probe.bind((servers.HOST, 0))
        free = probe.getsockname()[1]
    assert servers.free_port(free) == free


def test_another_port_is_taken_if_somebody_has_the_usual_one():
    with socket.socket() as other:
        other.bind((servers.HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        assert servers.free_port(taken) not in (0, taken)


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('the database is of a later version')"]
    log, health = tmp_path / "server.log", f"http://{servers.HOST}:9/health"
    with (
        pytest.raises(ServerError, match="the database is of a later version"),
        servers.running(command, {}, log, health),
    ):
        pass
