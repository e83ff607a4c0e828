"""One process that answers: uvicorn with our protocol, on a socket that it was given."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn

from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.service.app import Service
from limitforge.service.http.fast_protocol import FastHttpProtocol
from limitforge.service.http.listener import Listener
from limitforge.service.log_setup import configure_logging
from limitforge.service.processes.memory import MemoryWatch
from limitforge.service.settings import Settings, load_settings

READY_BYTE = b"r"
EXIT_FAILED = 2


def uvicorn_config(service: Service, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        service,
        http=_protocol_factory(service.listener),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        timeout_keep_alive=int(settings.idle_seconds),
        timeout_graceful_shutdown=int(settings.shutdown_seconds),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )


def _protocol_factory(doors: Listener) -> type[asyncio.Protocol]:
    """As uvicorn calls it: once for each connection."""
    return cast("type[asyncio.Protocol]", partial(FastHttpProtocol, doors=doors))


class GracefulServer(uvicorn.Server):
    """Ends every connection in a shutdown, also one that was accepted before it and begins only then."""

    def __init__(self, config: uvicorn.Config, doors: Listener) -> None:
        super().__init__(config)
        self._doors = doors

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._doors.is_shutting_down = True
        await super().shutdown(sockets)


class WorkerServer(GracefulServer):
    """Tells when it is ready, and takes connections that were accepted already to their end. What asks for metrics on
    their own socket is answered beside it.
    """

    def __init__(
        self,
        service: Service,
        settings: Settings,
        on_ready: Callable[[], None],
        metrics_socket: socket.socket | None = None,
        parent_fd: int | None = None,
    ) -> None:
        """`parent` is a file descriptor that ends with the process that started this one."""
        super().__init__(uvicorn_config(service, settings), service.listener)
        self._on_ready = on_ready
        self._memory = MemoryWatch()
        self._parent_fd = parent_fd
        self._metrics_server = None if metrics_socket is None else MetricsServer(service, metrics_socket)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if self._metrics_server is not None:
                self._metrics_server.start()
            if self._parent_fd is not None:
                asyncio.get_running_loop().add_reader(self._parent_fd, self._on_parent_exit)
            self._memory.start()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._memory.stop()
        beside = () if self._metrics_server is None else (self._metrics_server.stop(),)
        await asyncio.gather(super().shutdown(sockets), *beside)

    def _on_parent_exit(self) -> None:
        """The parent never says anything: if there is something to read, it is its end."""
        if self._parent_fd is not None:
            asyncio.get_running_loop().remove_reader(self._parent_fd)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not make it drop what is in flight: whoever is that impatient sends SIGKILL."""
        self.should_exit = True


class MetricsServer(GracefulServer):
    """Metrics on their own socket, in the same loop; signals are for the one whose side it is at."""

    def __init__(self, service: Service, listening: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                service.metrics,
                http=_protocol_factory(service.metrics_listener),
                ws="none",
                lifespan="off",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_graceful_shutdown=1,
            ),
            service.metrics_listener,
        )
        self._listening = listening
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.get_running_loop().create_task(self.serve([self._listening]))

    async def stop(self) -> None:
        self.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """`python -m limitforge.service.processes.worker SOCKET READY FOLDER [METRICS]`: file descriptors of the listening socket,
    and of a pipe that is written to once checks are answered; a folder that all workers share; and the file descriptor
    of a second listening socket, for metrics alone.
    """
    listening, ready, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    metrics = socket.socket(fileno=int(sys.argv[4])) if len(sys.argv) > 4 else None
    try:
        settings = load_settings()
        validate_tls(settings)
        configure_logging(settings)
        service = Service(settings, folder)
    except LimitforgeError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    server = WorkerServer(service, settings, lambda: _signal_ready(ready), metrics, parent_fd=sys.stdin.fileno())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the parent
    with socket.socket(fileno=listening) as shared:
        run_server(server, [shared])
    raise SystemExit(0 if server.started else EXIT_FAILED)


def validate_tls(settings: Settings) -> None:
    """Raises InvalidInput where uvicorn would fail without a name, or ask a terminal for the key's password."""
    if not settings.tls_cert:
        return
    for name, file in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise InvalidInput(name, f"{file} can't be read: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except ssl.SSLError as error:
        why = (error.reason or "not PEM").lower().replace("_", " ")
        detail = f"{settings.tls_cert} is no certificate chain for the key {settings.tls_key}, without password: {why}"
        raise InvalidInput("tls_cert", detail) from None


def _signal_ready(ready: int) -> None:
    os.write(ready, READY_BYTE)
    os.close(ready)


def run_server(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(server.serve(sockets))
    else:
        uvloop.run(server.serve(sockets))


if __name__ == "__main__":
    main()
