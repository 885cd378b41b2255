"""Starts a long answer, ends it after a few pieces, and checks that the server stopped working on it.

A request to the engine model is cancelled by going away. Triton Server does not tell the steps of an ensemble that
their client is gone: there a second request with the same id and the input `stop` ends the first.
The check reads the server's metrics: the number of running requests must fall back to what it was.
"""

from __future__ import annotations

import argparse
import re
import time
import urllib.request
from contextlib import closing
from http.client import HTTPException

from common import ExampleError, Request, parser, run, text_inputs, text_of
from tritonclient.utils import InferenceServerException

RUNNING = "vllm:num_requests_running"
PROMPT = "Write a long story about a lighthouse keeper."


def main() -> None:
    arguments_parser = parser(__doc__, prompt=PROMPT)
    arguments_parser.set_defaults(max_tokens=1024)
    arguments_parser.add_argument("--after", type=int, default=8, help="pieces to wait for (default: %(default)s)")
    arguments_parser.add_argument("--metrics-url", help="host:port (default: the port after that of --url)")
    arguments = arguments_parser.parse_args()

    metrics_url = arguments.metrics_url or next_port(arguments.url)
    before = running_requests(metrics_url)
    with closing(Request(arguments.url, arguments.timeout)) as request:
        request.start(arguments.model, text_inputs(arguments.prompt, arguments), ["text_output"])
        for count, result in enumerate(request, start=1):
            print(*text_of(result), sep="", end="", flush=True)
            if count == arguments.after:
                break
        else:
            raise ExampleError("the answer ended before it could be cancelled: lower --after")
        if request.is_for_ensemble(arguments.model):
            stop(request, arguments)
            print("\nended by a `stop` with the same request id")
    # Closing the request cancelled it.
    cancelled_at = time.monotonic()
    if not request.ended:
        print("\ncancelled by the client")
    while running_requests(metrics_url) > before:
        if time.monotonic() - cancelled_at > 30:
            raise ExampleError("the server still works on the request 30 s after it was cancelled")
        time.sleep(0.1)
    print(f"the server runs {before:.0f} requests, as before ({time.monotonic() - cancelled_at:.1f} s later)")


def stop(request: Request, arguments: argparse.Namespace) -> None:
    """End `request` by its id, and read what is left of its answer."""
    with closing(Request(arguments.url, arguments.timeout, request.request_id)) as stopping:
        for _ in stopping.start(arguments.model, {"text_input": "", "stop": True}, ["text_output"]):
            pass
    try:
        for _ in request:
            pass
    except InferenceServerException as error:
        # How a request that was ended says so.
        if "cancelled" not in str(error):
            raise


def next_port(url: str) -> str:
    """Where the metrics are unless the server was told otherwise: gRPC has port 8001, they have 8002."""
    host, _, port = url.rpartition(":")
    if not port.isdigit():
        raise ExampleError(f"--url {url} is no host:port")
    return f"{host}:{int(port) + 1}"


def running_requests(url: str) -> float:
    """How many requests the server's engines work on, by their own metrics."""
    try:
        with urllib.request.urlopen(f"http://{url}/metrics", timeout=10) as response:
            text = response.read().decode()
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "give the server's metrics address with --metrics-url"
        raise ExampleError(f"cannot read the metrics at {url}: {reason}; {advice}") from error
    values = re.findall(rf"^{RUNNING}\{{.*\}} (\S+)$", text, re.MULTILINE)
    if not values:
        raise ExampleError(
            f"{url} exports no {RUNNING}: it serves no engine model, or --metrics-url is another server's"
        )
    return sum(map(float, values))


if __name__ == "__main__":
    run(main)
