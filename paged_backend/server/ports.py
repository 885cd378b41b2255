"""The three ports of a server: checks that they are free, picks free ones for port 0.

Knows sockets and the names of the flags; called by the launcher before the server starts.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from paged_backend.server.errors import LaunchError


@dataclass(frozen=True)
class Endpoints:
    """Address and ports the server listens on."""

    host: str
    http: int
    grpc: int
    metrics: int

    def url(self, port: int) -> str:
        """`host:port` as a client on this machine writes it."""
        return f"{bracketed(self.reachable)}:{port}"

    @property
    def reachable(self) -> str:
        """A wildcard address is no address to connect to: the loopback address of its family instead."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)


def bracketed(host: str) -> str:
    """IPv6 addresses take brackets before a port."""
    return f"[{host}]" if ":" in host else host


def choose_ports(host: str, http: int, grpc: int, metrics: int) -> Endpoints:
    """Check the wanted ports, all at once so that no two are the same; 0 becomes a free port.

    Raises:
        LaunchError: a port is taken or not allowed, or `host` is no address of this machine.
    """
    chosen = []
    with ExitStack() as held:
        # Ports named by number first, so that port 0 does not pick one of them.
        wanted = [("HTTP", "--http-port", http), ("gRPC", "--grpc-port", grpc)]
        wanted.append(("metrics", "--metrics-port", metrics))
        for position, (name, flag, port) in sorted(enumerate(wanted), key=lambda item: not item[1][2]):
            chosen.append((position, _listen(held, host, port, name, flag)))
    return Endpoints(host, *(port for _, port in sorted(chosen)))


def _listen(held: ExitStack, host: str, port: int, name: str, flag: str) -> int:
    if not 0 <= port <= 65535:
        raise LaunchError(f"{flag} {port} is not a port: give 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = held.enter_context(socket.socket(family, kind, protocol))
        # Without it a port just released counts as taken for a minute. Listening (not only binding) is what makes
        # two flags with the same port collide.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise LaunchError(_explain(error, host, port, name, flag)) from error
    return int(listener.getsockname()[1])


def _explain(error: OSError, host: str, port: int, name: str, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{name} port {port} on {host} is in use: stop what listens there "
            f"or choose another with {flag} (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return f"{name} port {port} needs more rights: choose one above 1023 with {flag}"
    return f"cannot listen on --host {host}: {error.strerror or error}"
