"""Asks a running server over HTTP what is ready. Knows the server's health paths; called by the launcher."""

from __future__ import annotations

import http.client
import json
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass

# What an engine model has taken in and not fully answered yet.
_LIVE = re.compile(r"^paged_requests_in_flight(?:\{.*\})? (\S+)$", re.MULTILINE)
_FAILED = re.compile(r'^vllm:request_success_total\{.*finished_reason="error".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class EngineRequests:
    """Requests of all engine models: `live` are not fully answered yet, `failed` have ended with an error."""

    live: int
    failed: int


def ready_models(host: str, port: int, timeout: float = 5.0) -> list[str] | None:
    """Names of the models that answer requests, once the server and all of them do; None until then."""
    try:
        if _get(host, port, "/v2/health/ready", timeout) != 200:
            return None
        models = _loaded_models(host, port, timeout)
        for model in models:
            path = f"/v2/models/{urllib.parse.quote(model, safe='')}/ready"
            if _get(host, port, path, timeout) != 200:
                return None
        return models
    except (OSError, http.client.HTTPException, ValueError):
        # Not listening yet, or going down.
        return None


def engine_requests(address: str, timeout: float = 1.0) -> EngineRequests | None:
    """The requests of the engine models, by the metrics at `address` (host:port); None: no metrics of an engine."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout) as response:
            text = response.read().decode()
        live, failed = _LIVE.findall(text), _FAILED.findall(text)
        return EngineRequests(int(sum(map(float, live))), int(sum(map(float, failed)))) if live else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


def _get(host: str, port: int, path: str, timeout: float) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _loaded_models(host: str, port: int, timeout: float) -> list[str]:
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("POST", "/v2/repository/index", body='{"ready": true}')
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return sorted({model["name"] for model in answer})
