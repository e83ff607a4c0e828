"""A replica in a second process, controlled by messages."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from limitforge.catalog.credentials import Peppers
from limitforge.errors import LimitforgeError
from tests.catalog.replicas import Replica, decide
from tests.child_processes import ChildProcess

PATIENCE_SECONDS = 60.0
READY = "ready"


class SecondProcess:
    """The second process, seen from the test."""

    def __init__(self, database_url: str, redis_url: str | None, peppers: str) -> None:
        self._program = ChildProcess(run, database_url, redis_url, peppers)

    async def started(self) -> "SecondProcess":
        assert await self._read() == READY
        return self

    async def ask(self, what: str, **how: Any) -> Any:
        self._program.connection.send({"what": what, **how})
        return await self._read()

    async def limit(self, text: str) -> Any:
        """Return the limit of the caller with this key there, or the name of the error that it gets."""
        return await self.ask("limit", text=text)

    async def admits(self, text: str, subject: str) -> bool:
        """Return True if a check with this key is allowed there."""
        return bool(await self.ask("spend", text=text, subject=subject))

    async def seconds_until(self, text: str, wanted: Any, since: float) -> float:
        """Wait until a check there has this limit or error, and return the seconds since `since`."""
        answer = await self.ask("until", text=text, wanted=wanted)
        assert answer is not None, f"never {wanted}"
        return float(answer) - since

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("status")
        return answer

    def kill(self) -> None:
        self._program.kill()

    def stop(self) -> int | None:
        """Close the connection, which ends the process in an orderly way, and return its exit code."""
        return self._program.close_and_wait()

    async def _read(self) -> Any:
        return await asyncio.to_thread(self._program.receive)


@contextmanager
def second_process(database_url: str, redis_url: str | None, peppers: str) -> Iterator[SecondProcess]:
    process = SecondProcess(database_url, redis_url, peppers)
    try:
        yield process
    finally:
        process.stop()


# --- In the process --------------------------------------------------------------------------------------------------


async def reply_to(replica: Replica, question: dict[str, Any]) -> Any:
    match question:
        case {"what": "limit", "text": text}:
            return await _limit(replica, text)
        case {"what": "spend", "text": text, "subject": subject}:
            caller = await replica.live.cache.callers.find(text)
            return (await decide(caller, replica.limiter, subject=subject)).allowed
        case {"what": "until", "text": text, "wanted": wanted}:
            ends = time.monotonic() + PATIENCE_SECONDS / 2
            while time.monotonic() < ends:
                if await _limit(replica, text) == wanted:
                    return time.time()
                await asyncio.sleep(0.001)
            return None
        case {"what": "status"}:
            status, relay = replica.live.status(), replica.live._relay
            is_behind = relay is not None and relay.has_unpublished
            return {"database": status.database, "listening": status.listening, "owes": is_behind}
    raise AssertionError(question)


async def _limit(replica: Replica, text: str) -> int | str | None:
    try:
        return await replica.limit(text)
    except LimitforgeError as error:
        return type(error).__name__


async def serve(connection: Connection, database_url: str, redis_url: str | None, peppers: str) -> None:
    async with Replica(database_url, redis_url, peppers=Peppers.parse(peppers)) as replica:
        connection.send(READY)
        with contextlib.suppress(EOFError):
            while True:
                connection.send(await reply_to(replica, await asyncio.to_thread(connection.recv)))


def run(connection: Connection, *where: Any) -> None:
    asyncio.run(serve(connection, *where))
