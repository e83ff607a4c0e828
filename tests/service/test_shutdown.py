"""A shutdown answers every request that reached a connection, and then ends."""

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from limitforge.service.app import Service
from limitforge.service.http import bounded_connection
from limitforge.service.processes.worker import WorkerServer
from limitforge.service.settings import Settings
from tests.service.databases import migrate
from tests.service.live_service import CALL_SECONDS, PEPPERS

SECONDS = 30.0  # generous, because it takes milliseconds
REQUEST = b"GET /v1/health HTTP/1.1\r\nhost: a\r\n\r\n"


class ServerWithLateClient(WorkerServer):
    """A server whose client connects a few iterations of the event loop before the shutdown."""

    client: asyncio.Future[socket.socket]
    iterations: int

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        client = socket.create_connection(sockets[0].getsockname())
        for _ in range(self.iterations):
            await asyncio.sleep(0)
        self.client.set_result(client)
        await super().shutdown(sockets)


# How many iterations before the shutdown a client must connect, at least: with fewer, the loop does not accept it.
LOOPS = {"asyncio": (asyncio.run, 2), "uvloop": (uvloop.run, 0)}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("more", range(3))
def test_a_connection_that_begins_during_a_shutdown_is_answered_and_closed(
    tmp_path: Path, loop: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop accepts a connection before it calls the protocol."""
    monkeypatch.setattr(bounded_connection, "LINGER_SECONDS", CALL_SECONDS)
    settings = Settings(database_url=f"sqlite:///{tmp_path}/service.db", peppers=PEPPERS, shutdown_seconds=SECONDS)
    migrate(settings.database_url)
    run, least = LOOPS[loop]
    run(_connect_late(settings, least + more))


async def _connect_late(settings: Settings, iterations: int) -> None:
    server = ServerWithLateClient(Service(settings), settings, lambda: None)
    server.client, server.iterations = asyncio.Future(), iterations
    server.should_exit = True  # as soon as it has started
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(sock=await server.client)
            writer.write(REQUEST)
            answer = await reader.read()
            writer.close()
            await asyncio.gather(serving, writer.wait_closed())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in answer
