"""Find out which servers own which slots, without I/O: the same flow for asyncio, threads and redis-py.

A discovery flow is a generator. It yields one query at a time, and the caller sends in the reply of the server, or the
error that prevented one. It ends with the first valid answer.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from limitforge.errors import StoreUnavailable
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.topology.deployment import Deployment, DeploymentKind
from limitforge.stores.redis.topology.hash_slots import SLOT_COUNT

DISCOVERY_TIMEOUT_SECONDS = 0.5  # per server

HostPort = tuple[str, int]
Owners = list[HostPort | None]
"""The master of each slot, None where there is none. A deployment without a Cluster has one slot."""


class DiscoveryQuery(NamedTuple):
    """A command to send to one server."""

    address: Address
    command: tuple[str, ...]


T = TypeVar("T")
DiscoveryFlow = Generator[DiscoveryQuery, Any, T]


def discover_owners(deployment: Deployment, addresses: Iterable[Address]) -> DiscoveryFlow[Owners]:
    """Ask the servers at `addresses` in turn, and return what the first valid answer says about the slots.

    Raises StoreUnavailable if no server gives a valid answer.
    """
    is_sentinel = deployment.kind is DeploymentKind.SENTINEL
    command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", deployment.master_name) if is_sentinel else ("CLUSTER", "SLOTS")
    problem: BaseException | None = None
    for address in _without_duplicates(addresses):
        reply = yield DiscoveryQuery(address.with_login_only(), command)
        if isinstance(reply, BaseException):
            problem = reply
            continue
        owners = parse_owners(deployment.kind, address, reply)
        if owners:
            return owners
    message = "no server of the URL knows the current masters"
    raise StoreUnavailable(f"{message}: {problem}" if problem is not None else message)


def _without_duplicates(addresses: Iterable[Address]) -> Iterator[Address]:
    known: set[HostPort] = set()
    for address in addresses:
        if (address.host, address.port) not in known:
            known.add((address.host, address.port))
            yield address


def parse_owners(kind: DeploymentKind, queried: Address, reply: Any) -> Owners | None:
    """Return the owners that a reply names, or None if it is not a valid answer."""
    return _parse_sentinel_reply(reply) if kind is DeploymentKind.SENTINEL else _parse_cluster_slots(reply, queried)


def _parse_sentinel_reply(reply: Any) -> Owners | None:
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit():
            return [(host.decode(), int(port))]
    return None


def _parse_cluster_slots(reply: Any, queried: Address) -> Owners | None:
    """Parse ranges of slots, each with its master first. A server that does not know its own host leaves it empty."""
    if not isinstance(reply, list) or not reply:
        return None
    owners: Owners = [None] * SLOT_COUNT
    for row in reply:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOT_COUNT:
                name = host.decode() if isinstance(host, bytes) else ""
                if name != "?":
                    owners[first : last + 1] = [(name or queried.host, port)] * (last - first + 1)
            case _:
                return None
    return owners


def uncovered_slot_error(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no server of the Cluster owns slot {slot}")
