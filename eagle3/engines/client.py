"""Ask a server over HTTP, with the standard library alone."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from eagle3.errors import EngineError

# A long answer in a full batch, on a slow machine; a server that died answers at once.
PATIENCE_S = 3600.0


class HttpClient:
    """One server's address, and requests to it that fail with the address and its words."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"{url!r} is not the address of a server; write http://host:port, without a path"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        # A proxy set for the outside world must not be asked for this very machine.
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)

    def get_text(self, path: str, patience_s: float = 30.0) -> str:
        """GET, as text."""
        return self._send(urllib.request.Request(self.url + path), patience_s).decode()

    def get(self, path: str) -> Any:
        """GET, as JSON."""
        return self._json(path, self.get_text(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST JSON, get JSON."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._json(path, self._send(request, PATIENCE_S).decode())

    def is_healthy(self) -> bool:
        """Whether `/health` answers; false also while nobody listens."""
        try:
            self.get_text("/health", patience_s=5.0)
        except EngineError:
            return False
        return True

    def _send(self, request: urllib.request.Request, patience_s: float) -> bytes:
        try:
            with self._opener.open(request, timeout=patience_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:500]
            raise EngineError(f"{request.full_url} answered {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{request.full_url} does not answer ({error}); is the server running there?"
            ) from error

    def _json(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} answered no JSON: {text[:200]!r}") from error
