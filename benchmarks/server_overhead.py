"""What Triton Server and gRPC cost: the same load on the engine alone and through a server, in one run.

    python benchmarks/server_overhead.py [--model MODEL] [--streams 32] [--tokens 64] [--rounds 3] [--threads N]

Prints the tokens per second of `--streams` concurrent streams, and the median time to the first token (TTFT) of one
stream at a time, both ways. They take turns, with every round and every single stream, so that a machine that changes
its speed changes both.

The clients share the machine with the server: on few cores, what they use is part of the difference, so the CPU time
of clients, server and model process is printed too. With fewer `--threads` than cores, for the engine both ways, they
use cores that the engine does not, as clients on other machines do. Each prompt is used once, so no round profits from
another's prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

# `python benchmarks/server_overhead.py` puts only this file's folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import Request, as_tensor
from tritonclient import grpc
from tritonclient.grpc import aio as grpc_aio

from benchmarks.serving.run_triton import Server
from paged_backend.config import DEFAULT_MODEL, EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.model_source import resolve_model
from paged_backend.sampling_params import SamplingParams

ANSWER_SECONDS = 600
OUTPUTS = ("text_output", "num_output_tokens")
TOPICS = ("rivers", "bread", "the moon", "chess", "bees", "bridges", "glass", "rain")
_numbers = itertools.count(1000)


def fresh_prompt() -> str:
    """A prompt that differs from all others in its first words."""
    number = next(_numbers)
    return f"{number}. Write a text about {TOPICS[number % len(TOPICS)]} and about the number {number}."


class EngineAlone:
    """The load on the engine in this process, as `LLM.generate` runs it."""

    def __init__(self, config: EngineConfig, tokens: int) -> None:
        self._engine = Engine(config)
        self._params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def together(self, streams: int) -> int:
        """Run `streams` requests at once; returns how many tokens came."""
        for _ in range(streams):
            self._add(self._params)
        tokens = 0
        while self._engine.has_unfinished_requests():
            tokens += sum(len(delta.token_ids) for delta in self._engine.step())
        return tokens

    def first_token(self) -> float:
        """Seconds to the first token of a single request."""
        began = time.perf_counter()
        self._add(SamplingParams(temperature=0, max_tokens=1))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - began

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def _add(self, params: SamplingParams) -> None:
        self._engine.add_request(self._engine.make_request(str(next(_numbers)), fresh_prompt(), params))


class ThroughServer:
    """The load through gRPC streams, one per request, read by one thread: what clients use the engine lacks."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._tokens = tokens

    def together(self, streams: int) -> int:
        """Run `streams` requests at once; returns how many tokens came."""
        return asyncio.run(self._together(streams))

    async def _together(self, streams: int) -> int:
        async with grpc_aio.InferenceServerClient(self._url) as client:
            return sum(await asyncio.gather(*(self._stream(client) for _ in range(streams))))

    async def _stream(self, client: grpc_aio.InferenceServerClient) -> int:
        async def requests() -> AsyncIterator[dict[str, object]]:
            yield {
                "model_name": "paged_llm",
                "inputs": [as_tensor(name, value) for name, value in self._inputs(self._tokens).items()],
                "outputs": [grpc.InferRequestedOutput(name) for name in OUTPUTS],
                "enable_empty_final_response": True,
            }

        received = 0
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            if result.get_response().outputs:
                received += int(result.as_numpy("num_output_tokens").sum())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        return received

    def first_token(self) -> float:
        """Seconds to the first token of a single request, its connection made before."""
        with contextlib.closing(Request(self._url, ANSWER_SECONDS)) as request:
            request.is_for_ensemble("paged_llm")
            inputs = self._inputs(1)
            began = time.perf_counter()
            first = 0.0
            for _ in request.start("paged_llm", inputs, list(OUTPUTS)):
                first = first or time.perf_counter() - began
        return first

    def _inputs(self, tokens: int) -> dict[str, object]:
        return {
            "text_input": fresh_prompt(),
            "stream": True,
            "return_num_output_tokens": True,
            "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True}),
        }


@contextlib.contextmanager
def server(arguments: dict[str, object]) -> Iterator[tuple[str, int]]:
    """A server of its own; its gRPC address and the process id of its launcher."""
    made = Server(arguments)
    try:
        yield made.wait_ready(), made.pid
    finally:
        made.stop()


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU time so far: of this process, the clients, and of the server's processes by their kind."""
    spent = {"clients": time.process_time(), "server": 0.0, "model": 0.0}
    tick = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, fields = re.fullmatch(r"\d+ \((.*)\) (.*)", stat.read_text().strip()).groups()  # type: ignore[union-attr]
            values = fields.split()
            kind = {"tritonserver": "server", "triton_python_b": "model"}.get(name)
            if kind and _descends(int(stat.parent.name), launcher):
                spent[kind] += (int(values[11]) + int(values[12])) / tick
    return spent


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def tokens_per_second(run: Callable[[int], int], streams: int) -> float:
    """How fast a load gives tokens."""
    began = time.perf_counter()
    return run(streams) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--singles", type=int, default=20, help="requests per round for TTFT (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of the engine (default: as many as the process may use)")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens per response (default: %(default)s)")
    parsed = parser.parse_args()
    model = str(resolve_model(parsed.model).path)
    engine = EngineAlone(EngineConfig(model=model, num_threads=parsed.threads), parsed.tokens)
    served = {"model": model, "num_threads": parsed.threads, "stream_interval": parsed.stream_interval}
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    firsts: dict[str, list[float]] = {"engine": [], "server": []}
    spent: list[dict[str, float]] = []
    with server(served) as (url, launcher):
        ways = {"engine": engine, "server": ThroughServer(url, parsed.tokens)}
        for way in ways.values():
            way.together(2)
        for _ in range(parsed.rounds):
            for name, way in ways.items():
                before = cpu_seconds(launcher)
                rates[name].append(tokens_per_second(way.together, parsed.streams))
                if name == "server":
                    spent.append({kind: value - before[kind] for kind, value in cpu_seconds(launcher).items()})
            for _ in range(parsed.singles):
                for name, way in ways.items():
                    firsts[name].append(way.first_token())
    engine.close()
    report(rates, firsts, parsed.streams)
    tokens = parsed.streams * parsed.tokens
    print("CPU time per token through the server: ", end="")
    print(", ".join(f"{kind} {1e3 * statistics.median(s[kind] for s in spent) / tokens:.2f} ms" for kind in spent[0]))


def report(rates: dict[str, list[float]], firsts: dict[str, list[float]], streams: int) -> None:
    """Print both measurements and their relation."""
    speed = {name: statistics.median(values) for name, values in rates.items()}
    ttft = {name: statistics.median(values) * 1000 for name, values in firsts.items()}
    for name in rates:
        rounds = ", ".join(f"{value:.1f}" for value in rates[name])
        print(f"{name:>6}  {speed[name]:8.1f} tokens/s with {streams} streams (rounds: {rounds})")
        print(f"{name:>6}  {ttft[name]:8.2f} ms median TTFT of single streams ({len(firsts[name])} requests)")
    print(
        f"through the server: {100 * speed['server'] / speed['engine']:.1f} % of the engine's tokens per second, ",
        end="",
    )
    more = statistics.median(server - engine for server, engine in zip(firsts["server"], firsts["engine"], strict=True))
    print(f"{more * 1000:+.2f} ms TTFT (median over pairs)")


if __name__ == "__main__":
    main()
