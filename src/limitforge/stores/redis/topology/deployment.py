"""Parse the URL of a Redis store into a deployment: one server, a Sentinel set or a Cluster.

redis://host:6379/0                              one server
redis+sentinel://host:26379,host:26379/name/0    the master that the sentinels name
redis+cluster://host:6379,host:6379              the masters of a Cluster, slot by slot
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from limitforge.errors import InvalidInput
from limitforge.stores.redis.address import Address, parse_address

MAX_SEEDS = 64
_PORT = re.compile(r":\w+$")  # also after an IPv6 address in brackets


class DeploymentKind(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Deployment:
    """The servers that a URL names, and how to connect to the servers that they name in turn."""

    kind: DeploymentKind
    seeds: tuple[Address, ...]
    """Where discovery starts: the sentinels, some servers of the Cluster, or the only server."""
    server_template: Address
    """How to connect to a discovered server, apart from its host and port."""
    master_name: str = ""
    """The name under which the sentinels know the master."""


def parse_store_url(url: str) -> Deployment:
    """Return the deployment that a URL describes, without connecting to it. Raises InvalidInput."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        address = parse_address(url)
        return Deployment(DeploymentKind.SINGLE, (address,), address)
    login, _, hosts = parts.netloc.rpartition("@")
    login = f"{login}@" if login else ""
    seeds = [seed for seed in hosts.split(",") if seed]
    if not 1 <= len(seeds) <= MAX_SEEDS:
        raise InvalidInput("url", f"names {len(seeds)} servers; give 1 to {MAX_SEEDS}, separated by commas")
    if kind == DeploymentKind.CLUSTER:
        return _parse_cluster_url(scheme, login, seeds, parts)
    return _parse_sentinel_url(scheme, login, seeds, parts)


def _parse_cluster_url(scheme: str, login: str, seeds: list[str], parts: SplitResult) -> Deployment:
    if parts.path.strip("/") not in ("", "0"):
        raise InvalidInput("url", "a Cluster has no databases: remove the path after the servers")
    query = urlencode(_query_options(parts))
    addresses = tuple(parse_address(f"{scheme}://{login}{seed}/0?{query}") for seed in seeds)
    return Deployment(DeploymentKind.CLUSTER, addresses, addresses[0].for_cluster())


def _parse_sentinel_url(scheme: str, login: str, seeds: list[str], parts: SplitResult) -> Deployment:
    master_name, _, database = parts.path.strip("/").partition("/")
    if not master_name:
        raise InvalidInput("url", "names no master: redis+sentinel://host:26379,host:26379/name")
    options = _query_options(parts)
    user, password = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
    query = urlencode(options)
    sentinel_login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    sentinels = tuple(
        parse_address(f"{scheme}://{sentinel_login}{_with_sentinel_port(seed)}/0?{query}").with_login_only()
        for seed in seeds
    )
    server = parse_address(f"{scheme}://{login}localhost/{database or 0}?{query}").for_master()
    return Deployment(DeploymentKind.SENTINEL, sentinels, server, master_name)


def _query_options(parts: SplitResult) -> dict[str, str]:
    return dict(parse_qsl(parts.query, keep_blank_values=True))


def _with_sentinel_port(seed: str) -> str:
    return seed if _PORT.search(seed) else f"{seed}:26379"
