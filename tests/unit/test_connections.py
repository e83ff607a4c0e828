"""Which connections give way."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from limitforge.service.connections import Connections


@dataclass(eq=False)
class Fake:
    """A connection that lets go of what it holds when it is asked."""

    connections: Connections
    owner: bytes = b""
    quiet_since: float = 0.0
    is_answering: bool = False
    buffered: int = 0
    held: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.connections.opened(self)

    def make_room(self) -> None:
        self.is_closed = True
        self.connections.account(self, 0, self.held)

    def hold(self, buffered: int, held: int = 0) -> None:
        self.connections.account(self, buffered, held)


def test_the_owner_that_holds_most_gives_way_first() -> None:
    connections = Connections(100, 1_000)
    modest = Fake(connections, b"modest")
    greedy = [Fake(connections, b"greedy") for _ in range(8)]
    modest.hold(150)
    for each in greedy:
        each.hold(120)
    assert not modest.is_closed
    assert any(each.is_closed for each in greedy)
    assert sum(each.buffered for each in (modest, *greedy)) <= 750


def test_strangers_are_one_owner_and_count_double() -> None:
    connections = Connections(100, 1_000)
    known = Fake(connections, b"known")
    known.hold(400)
    strangers = [Fake(connections) for _ in range(7)]
    for each in strangers:
        each.hold(100)
    assert not known.is_closed
    assert any(each.is_closed for each in strangers)


def test_what_is_being_decided_counts_but_does_not_give_way() -> None:
    connections = Connections(100, 1_000)
    deciding = Fake(connections, b"deciding")
    deciding.hold(0, held=990)
    late = Fake(connections, b"late")
    late.hold(50)
    assert late.is_closed
    assert not deciding.is_closed
    deciding.hold(0, held=0)
    next_one = Fake(connections, b"next")
    next_one.hold(900)
    assert not next_one.is_closed


def test_a_connection_that_ends_while_it_is_decided_counts_until_then() -> None:
    connections = Connections(100, 1_000)
    gone = Fake(connections, b"gone")
    gone.hold(0, held=990)
    connections.closed(gone)
    late = Fake(connections, b"late")
    late.hold(50)
    assert late.is_closed


def test_those_that_are_quiet_for_longest_are_closed() -> None:
    connections = Connections(32, 1_000)
    known = [Fake(connections, b"known", quiet_since=float(at)) for at in range(32)]
    newest = Fake(connections, quiet_since=99.0)
    assert [each.is_closed for each in known] == [True] * 2 + [False] * 30
    assert not newest.is_closed


def test_strangers_go_first_if_they_have_more_than_half() -> None:
    connections = Connections(32, 1_000)
    known = [Fake(connections, b"known", quiet_since=0.0) for _ in range(10)]
    strangers = [Fake(connections, quiet_since=float(at)) for at in range(1, 24)]
    assert not any(each.is_closed for each in known)
    assert [each.is_closed for each in strangers[:2]] == [True, True]


def test_those_that_are_being_answered_stay() -> None:
    connections = Connections(4, 1_000)
    busy = [Fake(connections, b"known", is_answering=True) for _ in range(4)]
    newest = Fake(connections)
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
from limitforge.service.connections import fitting
print(fitting({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(fits), str(limit)]
