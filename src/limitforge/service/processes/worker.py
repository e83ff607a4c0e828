"""A worker: uvicorn with the fast protocol, on a listening socket that it inherits."""

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
from limitforge.service.http.connection_context import ConnectionContext
from limitforge.service.http.fast_protocol import FastHttpProtocol
from limitforge.service.log_setup import configure_logging
from limitforge.service.processes.memory import MemoryWatch
from limitforge.service.settings import Settings, load_settings

READY_BYTE = b"r"
EXIT_FAILED = 2


def uvicorn_config(service: Service, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        service,
        http=_protocol_factory(service.connection_context),
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


def _protocol_factory(context: ConnectionContext) -> type[asyncio.Protocol]:
    """Return the factory of protocols. uvicorn expects a class, and calls it once for each connection."""
    return cast("type[asyncio.Protocol]", partial(FastHttpProtocol, context=context))


class GracefulServer(uvicorn.Server):
    """Shuts down every connection, even one that asyncio hands over after the shutdown began."""

    def __init__(self, config: uvicorn.Config, context: ConnectionContext) -> None:
        super().__init__(config)
        self._context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.is_shutting_down = True
        await super().shutdown(sockets)


class WorkerServer(GracefulServer):
    """The server of a worker. It also runs the server of the metrics port, if there is one."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        on_ready: Callable[[], None],
        metrics_socket: socket.socket | None = None,
        parent_fd: int | None = None,
    ) -> None:
        """`parent_fd` is a file descriptor that becomes readable when the parent process ends."""
        super().__init__(uvicorn_config(service, settings), service.connection_context)
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
        metrics_server = () if self._metrics_server is None else (self._metrics_server.stop(),)
        await asyncio.gather(super().shutdown(sockets), *metrics_server)

    def _on_parent_exit(self) -> None:
        """Stop. The parent never writes to the pipe, so if it is readable, it has been closed."""
        if self._parent_fd is not None:
            asyncio.get_running_loop().remove_reader(self._parent_fd)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a graceful shutdown. Unlike in uvicorn, a second signal does not drop requests in flight."""
        self.should_exit = True


class MetricsServer(GracefulServer):
    """Serves metrics on a socket of their own, in the event loop of the worker's server, which handles the signals."""

    def __init__(self, service: Service, metrics_socket: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                service.metrics,
                http=_protocol_factory(service.metrics_context),
                ws="none",
                lifespan="off",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                log_config=None,
                timeout_graceful_shutdown=1,
            ),
            service.metrics_context,
        )
        self._metrics_socket = metrics_socket
        self._serve_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serve_task = asyncio.get_running_loop().create_task(self.serve([self._metrics_socket]))

    async def stop(self) -> None:
        self.should_exit = True
        if self._serve_task is not None:
            await asyncio.gather(self._serve_task, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the worker's server, which stops this one."""
        yield


def main() -> None:
    """Run `python -m limitforge.service.processes.worker SOCKET READY FOLDER [METRICS]`.

    SOCKET is the file descriptor of the listening socket. READY is that of a pipe, which receives a byte once the
    worker is ready. FOLDER is shared by all workers. METRICS is the file descriptor of a listening socket for metrics.
    """
    socket_fd, ready_fd, counters_folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    metrics_socket = socket.socket(fileno=int(sys.argv[4])) if len(sys.argv) > 4 else None
    try:
        settings = load_settings()
        validate_tls(settings)
        configure_logging(settings)
        service = Service(settings, counters_folder)
    except LimitforgeError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    server = WorkerServer(
        service, settings, lambda: _signal_ready(ready_fd), metrics_socket, parent_fd=sys.stdin.fileno()
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent handles it
    with socket.socket(fileno=socket_fd) as server_socket:
        run_server(server, [server_socket])
    raise SystemExit(0 if server.started else EXIT_FAILED)


def validate_tls(settings: Settings) -> None:
    """Raise InvalidInput for files that uvicorn can't use.

    It would not name the file in its error, and would ask for the password of an encrypted key.
    """
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
        reason = (error.reason or "not PEM").lower().replace("_", " ")
        problem = f"{settings.tls_cert} and {settings.tls_key} are not a certificate chain and its key"
        raise InvalidInput("tls_cert", f"{problem} without a password: {reason}") from None


def _signal_ready(ready_fd: int) -> None:
    os.write(ready_fd, READY_BYTE)
    os.close(ready_fd)


def run_server(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    """Run a server until it stops: on uvloop if it is installed, else on asyncio."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(server.serve(sockets))
    else:
        uvloop.run(server.serve(sockets))


if __name__ == "__main__":
    main()
