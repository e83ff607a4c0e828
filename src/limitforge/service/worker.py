"""One process that answers: uvicorn with our protocol, on a socket that it was given."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from limitforge.errors import LimitforgeError
from limitforge.service.app import Service
from limitforge.service.protocol import CheckProtocol
from limitforge.service.settings import Settings, load

READY = b"r"
FAILED = 2


def config(service: Service, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        service,
        http=CheckProtocol,
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


class Server(uvicorn.Server):
    """Tells when it is ready, and takes connections that were accepted already to their end."""

    def __init__(self, service: Service, settings: Settings, ready: Callable[[], None]) -> None:
        super().__init__(config(service, settings))
        self._tell_ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not make it drop what is in flight: whoever is that impatient sends SIGKILL."""
        self.should_exit = True


def main() -> None:
    """`python -m limitforge.service.worker SOCKET READY`: file descriptors of the listening socket, and of a pipe that
    is written to once checks are answered.
    """
    listening, ready = int(sys.argv[1]), int(sys.argv[2])
    try:
        settings = load()
        set_up_logging(settings)
        service = Service(settings)
    except LimitforgeError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(FAILED) from None
    server = Server(service, settings, lambda: _tell(ready))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the parent
    with socket.socket(fileno=listening) as shared:
        run(server, [shared])
    raise SystemExit(0 if server.started else FAILED)


def _tell(ready: int) -> None:
    os.write(ready, READY)
    os.close(ready)


def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(server.serve(sockets))
    else:
        uvloop.run(server.serve(sockets))


def set_up_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    for name in ("aiosqlite", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(name).setLevel("WARNING")  # what they say at other levels holds parameters, or nothing new


if __name__ == "__main__":
    main()
