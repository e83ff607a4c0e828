"""A second process of a service: a node and a limiter, which do what they are asked, as a program of its own.

    python -m tests.catalog.second <database> <redis or -> <peppers>

Each line that it reads is a question in JSON, each line that it writes the answer.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from limitforge.catalog.credentials import Peppers
from limitforge.errors import LimitforgeError
from tests.catalog.live import Member, decide

PATIENCE_SECONDS = 60.0
READY = "ready"


class Second:
    """That process, from the outside."""

    def __init__(self, database_url: str, redis_url: str | None, peppers: str) -> None:
        command = [sys.executable, "-m", "tests.catalog.second", database_url, redis_url or "-", peppers]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def started(self) -> "Second":
        assert await self._read() == READY
        return self

    async def ask(self, what: str, **how: Any) -> Any:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"what": what, **how}) + "\n")
        stdin.flush()
        return await self._read()

    async def limit(self, text: str) -> Any:
        """By how much whoever has this key is limited there, or with what it is refused."""
        return await self.ask("limit", text=text)

    async def spends(self, text: str, subject: str) -> bool:
        """Whether a request with this key is let through there."""
        return bool(await self.ask("spend", text=text, subject=subject))

    async def sees(self, text: str, wanted: Any, since: float) -> float:
        """How many seconds after that moment it was limited, or refused, in this way there."""
        answer = await self.ask("until", text=text, wanted=wanted)
        assert answer is not None, f"never {wanted}"
        return float(answer) - since

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("status")
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> int:
        """As its stdin ends, so does it, in an orderly way; tells its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    async def _read(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(stdout.readline), PATIENCE_SECONDS)
        assert line, f"the second process has ended with {self._process.poll()}"
        return json.loads(line)


@contextmanager
def second(database_url: str, redis_url: str | None, peppers: str) -> Iterator[Second]:
    process = Second(database_url, redis_url, peppers)
    try:
        yield process
    finally:
        process.end()


# --- From the inside -------------------------------------------------------------------------------------------------


async def answer(member: Member, question: dict[str, Any]) -> Any:
    match question:
        case {"what": "limit", "text": text}:
            return await _limit(member, text)
        case {"what": "spend", "text": text, "subject": subject}:
            caller = await member.node.snapshots.find(text)
            return (await decide(caller, member.limiter, subject=subject)).allowed
        case {"what": "until", "text": text, "wanted": wanted}:
            ends = time.monotonic() + PATIENCE_SECONDS / 2
            while time.monotonic() < ends:
                if await _limit(member, text) == wanted:
                    return time.time()
                await asyncio.sleep(0.001)
            return None
        case {"what": "status"}:
            status, relay = member.node.status(), member.node._relay
            is_behind = relay is not None and relay.is_behind
            return {"database": status.database, "listening": status.listening, "owes": is_behind}
    raise AssertionError(question)


async def _limit(member: Member, text: str) -> int | str | None:
    try:
        return await member.limit(text)
    except LimitforgeError as error:
        return type(error).__name__


async def serve(answers: TextIO, database_url: str, redis_url: str, peppers: str) -> None:
    member = Member(database_url, None if redis_url == "-" else redis_url, peppers=Peppers.parse(peppers))
    async with member:
        answers.write(json.dumps(READY) + "\n")
        answers.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            answers.write(json.dumps(await answer(member, json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        asyncio.run(serve(out, *sys.argv[1:]))
