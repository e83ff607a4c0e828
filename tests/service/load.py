"""Many concurrent clients that send checks on persistent connections until stopped, and record every answer."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PAUSE_SECONDS = 0.01  # between the checks of a client, so that the load leaves CPU time for the tests
STEP_SECONDS = 20.0  # an answer that takes longer counts as lost


@dataclass
class Observation:
    """One answer: when it came, how long it took, and its content."""

    at: float
    seconds: float
    resource: str
    status: int
    degraded: str | None


@dataclass
class Load:
    """All answers so far, and the requests that were never answered (`lost`)."""

    port: int
    key: str
    resources: Sequence[str]
    subject: str | None = None
    """The subject of all checks; by default each client has its own."""
    answers: list[Observation] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _is_over: bool = False

    def since(self, at: float) -> list[Observation]:
        """Return the answers to checks that were sent after that time."""
        return [seen for seen in list(self.answers) if seen.at - seen.seconds > at]

    def statuses(self, since: float = 0.0) -> Counter[tuple[str, int, str | None]]:
        return Counter((seen.resource, seen.status, seen.degraded) for seen in self.since(since))

    def wait_for(self, count: int, seconds: float = 60.0) -> None:
        """Wait for so many more answers."""
        wanted, deadline = len(self.answers) + count, time.monotonic() + seconds
        while len(self.answers) < wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{count - (wanted - len(self.answers))} of {count} answers came; {self.lost[:3]}")
            time.sleep(0.01)

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    async def _client(self, number: int) -> None:
        turn = number
        while not self._is_over:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError as error:
                self.lost.append(f"connecting: {error!r}")
                await asyncio.sleep(0.05)
                continue
            try:
                while not self._is_over:
                    turn += 1
                    if not await self._check(
                        reader, writer, self.resources[turn % len(self.resources)], self.subject or f"u{number}"
                    ):
                        break
                    await asyncio.sleep(PAUSE_SECONDS)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.lost.append(repr(error))
            finally:
                writer.close()

    async def _check(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, resource: str, subject: str
    ) -> bool:
        """Send a check, record its answer, and return whether the connection stays open."""
        body = json.dumps({"resource": resource, "subject": subject}).encode()
        head = f"POST /v1/check HTTP/1.1\r\nhost: test\r\nx-api-key: {self.key}\r\ncontent-type: application/json\r\n"
        began = time.monotonic()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(STEP_SECONDS):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
        now = time.monotonic()
        self.answers.append(Observation(now, now - began, resource, int(lines[0].split()[1]), body.get("degraded")))
        return fields.get("connection") != "close"


@contextlib.contextmanager
def run_load(
    port: int, key: str, resources: Sequence[str], clients: int = 16, subject: str | None = None
) -> Iterator[Load]:
    """Run clients that check one resource after another until the block ends."""
    running = Load(port, key, resources, subject)
    thread = threading.Thread(target=lambda: asyncio.run(running.run(clients)))
    thread.start()
    try:
        yield running
    finally:
        running._is_over = True
        thread.join()
