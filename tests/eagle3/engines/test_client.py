import pytest
from http_stand_in import answering

from eagle3.engines.client import HttpClient
from eagle3.errors import EngineError


def test_an_address_may_end_in_v1_as_openai_clients_write_it():
    assert HttpClient("http://127.0.0.1:8000/v1").url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://host", ""])
def test_what_is_no_address_is_refused_with_the_form_to_write(url):
    with pytest.raises(EngineError, match="write http://host:port"):
        HttpClient(url)


def test_a_server_that_is_not_there_is_named():
    client = HttpClient("http://127.0.0.1:9")

    assert not client.is_healthy()
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/version does not answer.*is the server"):
        client.get("/version")


def test_a_refused_request_carries_the_servers_words():
    with (
        answering({}) as server,
        pytest.raises(EngineError, match="/v1/completions answered 404: null"),
    ):
        HttpClient(server.url).post("/v1/completions", {"prompt": [1]})


def test_a_proxy_of_the_outside_world_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    with answering({"/version": {"version": "1"}}) as server:
        assert HttpClient(server.url).get("/version") == {"version": "1"}


def test_an_answer_that_is_no_json_is_shown():
    with (
        answering({"/version": "<html>"}) as server,
        pytest.raises(EngineError, match="answered no JSON: '<html>'"),
    ):
        HttpClient(server.url).get("/version")
