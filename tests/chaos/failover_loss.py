"""Record measured numbers: printed, and written as JSON to the file that LIMITFORGE_CHAOS_REPORT names."""

import fcntl
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from tests.topologies import HOST

REPORT = "LIMITFORGE_CHAOS_REPORT"


def record_numbers(name: str, **numbers: Any) -> None:
    """Add numbers under a name. All processes share one JSON object."""
    print(json.dumps({name: numbers}))  # noqa: T201 - pytest shows it with -s, and when the test fails
    path = os.environ.get(REPORT)
    if path is None:
        return
    with Path(path).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        recorded = json.loads(file.read() or "{}")
        recorded.setdefault(name, []).append(numbers)
        file.seek(0)
        file.truncate()
        json.dump(recorded, file, indent=2, sort_keys=True)


class RawCounter:
    """Sends INCR and WAIT in a loop on one raw connection, until the server dies."""

    def __init__(self, port: int, key: str, replicas: int, wait_ms: int) -> None:
        self._place = (HOST, port)
        incr = f"*2\r\n$4\r\nINCR\r\n${len(key)}\r\n{key}\r\n"
        wait = f"*3\r\n$4\r\nWAIT\r\n${len(str(replicas))}\r\n{replicas}\r\n${len(str(wait_ms))}\r\n{wait_ms}\r\n"
        self._request = (incr + wait).encode()
        self._replicas = replicas
        self.confirmed = 0  # the highest count that enough replicas acknowledged
        self.answered = 0  # the highest count that was answered
        self._thread = threading.Thread(target=self._count, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(20)

    def _count(self) -> None:
        try:
            with socket.create_connection(self._place, timeout=5) as server, server.makefile("rb") as replies:
                while True:
                    server.sendall(self._request)
                    self.answered = _number(replies.readline())
                    if _number(replies.readline()) >= self._replicas:
                        self.confirmed = self.answered
        except (OSError, ValueError):
            return  # the test killed it


def _number(line: bytes) -> int:
    if not line.startswith(b":"):
        raise ValueError(line)
    return int(line[1:])
