"""Starts a long answer, goes away after a few pieces, and checks that the server stopped working on it.

The check reads the server's metrics: the number of running requests must fall back to what it was.
"""

from __future__ import annotations

import re
import time
import urllib.request
from contextlib import closing

from common import ExampleError, Request, parser, run, text_inputs, text_of

RUNNING = "vllm:num_requests_running"
PROMPT = "Write a long story about a lighthouse keeper."


def main() -> None:
    arguments_parser = parser(__doc__, prompt=PROMPT)
    arguments_parser.set_defaults(max_tokens=1024)
    arguments_parser.add_argument("--after", type=int, default=8, help="pieces to wait for (default: %(default)s)")
    arguments_parser.add_argument("--metrics-url", default="127.0.0.1:8002", help="host:port (default: %(default)s)")
    arguments = arguments_parser.parse_args()

    before = running_requests(arguments.metrics_url, arguments.model)
    with closing(Request(arguments.url, arguments.timeout)) as request:
        request.start(arguments.model, text_inputs(arguments.prompt, arguments), ["text_output"])
        for count, result in enumerate(request, start=1):
            print(*text_of(result), sep="", end="", flush=True)
            if count == arguments.after:
                break
        else:
            raise ExampleError("the answer ended before it could be cancelled: lower --after")
    # Closing the request cancelled it.
    cancelled_at = time.monotonic()
    print("\ncancelled by the client")
    while running_requests(arguments.metrics_url, arguments.model) > before:
        if time.monotonic() - cancelled_at > 30:
            raise ExampleError("the server still works on the request 30 s after it was cancelled")
        time.sleep(0.1)
    print(f"the server runs {before:.0f} requests, as before ({time.monotonic() - cancelled_at:.1f} s later)")


def running_requests(url: str, model: str) -> float:
    """How many requests the engine works on, by its own metrics."""
    try:
        with urllib.request.urlopen(f"http://{url}/metrics", timeout=10) as response:
            text = response.read().decode()
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ExampleError(f"cannot read the metrics at {url} (--metrics-url): {reason}") from error
    values = re.findall(rf'^{RUNNING}\{{[^}}]*model="{model}"[^}}]*\}} (\S+)$', text, re.MULTILINE)
    if not values:
        raise ExampleError(f"the server exports no {RUNNING} for model {model}")
    return sum(map(float, values))


if __name__ == "__main__":
    run(main)
