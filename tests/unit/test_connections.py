"""The choice of connections to evict."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from limitforge.service.http.connections import MAX_LOOKUP_BYTES, ConnectionRegistry


@dataclass(eq=False)
class FakeConnection:
    """A connection that frees what it holds when it is evicted."""

    connections: ConnectionRegistry
    owner: bytes = b""
    quiet_since: float = 0.0
    is_answering: bool = False
    buffered_bytes: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.connections.add(self)

    def evict(self) -> None:
        self.is_closed = True
        self.connections.set_buffered(self, 0)

    def hold(self, buffered_bytes: int) -> None:
        self.connections.set_buffered(self, buffered_bytes)


@dataclass
class FakeRequest:
    """A request whose key has to be looked up."""

    size: int
    awaits_lookup: bool = False


KIB = 1_024


def test_the_owner_that_holds_most_is_evicted_first() -> None:
    connections = ConnectionRegistry(100, 1_000 * KIB)
    modest = FakeConnection(connections, b"modest")
    greedy = [FakeConnection(connections, b"greedy") for _ in range(8)]
    modest.hold(150 * KIB)
    for each in greedy:
        each.hold(120 * KIB)
    assert not modest.is_closed
    assert any(each.is_closed for each in greedy)
    assert sum(each.buffered_bytes for each in (modest, *greedy)) <= 750 * KIB


def test_clients_without_a_key_are_one_owner_and_count_double() -> None:
    connections = ConnectionRegistry(100, 1_000 * KIB)
    known = FakeConnection(connections, b"known")
    known.hold(400 * KIB)
    unknown = [FakeConnection(connections) for _ in range(7)]
    for each in unknown:
        each.hold(100 * KIB)
    assert not known.is_closed
    assert any(each.is_closed for each in unknown)


def test_an_owner_that_holds_little_is_never_evicted() -> None:
    connections = ConnectionRegistry(100, 100 * KIB)
    little = [FakeConnection(connections, b"%d" % index) for index in range(10)]
    for each in little:
        each.hold(60 * KIB)
    assert not any(each.is_closed for each in little)


def test_large_requests_that_wait_for_a_look_up_are_bounded() -> None:
    connections = ConnectionRegistry()
    large = [FakeRequest(64 * KIB) for _ in range(100)]
    taken = [each for each in large if connections.admit_lookup(each)]
    assert sum(each.size for each in taken) == MAX_LOOKUP_BYTES
    assert connections.admit_lookup(FakeRequest(100))
    connections.release_lookup(taken[0])
    connections.release_lookup(taken[0])
    assert not connections.admit_lookup(FakeRequest(65 * KIB))
    assert not connections.admit_lookup(FakeRequest(64 * KIB)), "the small one still waits"
    connections.release_lookup(taken[1])
    assert connections.admit_lookup(FakeRequest(64 * KIB))


def test_the_longest_idle_connections_are_closed() -> None:
    connections = ConnectionRegistry(32, 1_000)
    known = [FakeConnection(connections, b"%d" % index, quiet_since=float(index)) for index in range(32)]
    newest = FakeConnection(connections, quiet_since=99.0)
    assert [each.is_closed for each in known] == [True] * 2 + [False] * 30
    assert not newest.is_closed


@pytest.mark.parametrize("greedy", [b"", b"greedy"])
def test_the_owner_with_most_connections_loses_some_first(greedy: bytes) -> None:
    connections = ConnectionRegistry(32, 1_000)
    modest = [FakeConnection(connections, b"modest", quiet_since=0.0) for _ in range(10)]
    many = [FakeConnection(connections, greedy, quiet_since=float(index)) for index in range(1, 24)]
    assert not any(each.is_closed for each in modest)
    assert [each.is_closed for each in many[:3]] == [True, True, False]


def test_those_that_are_being_answered_stay() -> None:
    connections = ConnectionRegistry(4, 1_000)
    busy = [FakeConnection(connections, b"known", is_answering=True) for _ in range(4)]
    newest = FakeConnection(connections)
    assert newest.is_closed
    assert not any(each.is_closed for each in busy)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "fits", "limit"),
    [
        (4_096, 8_192, 2_000, 2_000, 4_096),
        (1_024, 8_192, 2_000, 2_000, 2_256),
        (1_024, 1_024, 2_000, 768, 1_024),
        (256, 256, 2_000, 128, 256),
    ],
)
def test_a_process_asks_for_the_files_that_its_connections_need(
    soft: int, hard: int, wanted: int, fits: int, limit: int
) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from limitforge.service.http.connections import raise_file_limit
print(raise_file_limit({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(fits), str(limit)]
