"""Find the client's IP address behind trusted proxies.

Only the fields of listed proxies count, and they are read from right to left up to the first address that is not
listed. With 10.0.0.0/8 listed, both of these requests come from 203.0.113.7:

    X-Forwarded-For: 198.51.100.1, 203.0.113.7, 10.0.0.2
    Forwarded: for=203.0.113.7;proto=https, for=10.0.0.2
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from limitforge.core.exact import short_repr
from limitforge.errors import InvalidInput

MAX_HOPS = 32  # how many addresses are read

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_FOR = re.compile(rb'(?:^|;)\s*for\s*=\s*"?([^";]*)', re.IGNORECASE)
_PORT = re.compile(r"^(?:\[(?P<v6>[^\]]*)\](?::\d+)?|(?P<v4>[\d.]+):\d+)$")


class TrustedProxies:
    """The networks whose Forwarded and X-Forwarded-For fields are trusted."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    @classmethod
    def parse(cls, text: str) -> "TrustedProxies":
        """Parse a list of addresses and networks, such as `10.0.0.0/8, ::1`. Raises InvalidInput."""
        networks = []
        for word in filter(None, (word.strip() for word in text.split(","))):
            try:
                networks.append(ip_network(word))
            except ValueError:
                expected = "must be addresses or networks, such as 10.0.0.0/8,::1"
                raise InvalidInput("trusted_proxies", f"{expected}, got {short_repr(word)}") from None
        return cls(networks)

    def client_address(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the client's address, given the address of the connection's peer and the header fields.

        If Forwarded and X-Forwarded-For disagree, neither is used: a proxy that writes one of them may pass on the
        other as the client made it up.
        """
        if not self._networks or not self._is_trusted(_parse_address(peer)):
            return peer
        found = {self._first_untrusted(peer, hops) for hops in _forwarded_hops(headers)}
        return found.pop() if len(found) == 1 else peer

    def _first_untrusted(self, peer: str, hops: Iterable[str]) -> str:
        """Return the first address that is not a trusted proxy, or the last one before a hop without an address."""
        client = peer
        for hop in hops:
            address = _parse_address(hop)
            if address is None:
                return client
            client = str(address)
            if not self._is_trusted(address):
                return client
        return client

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _forwarded_hops(headers: Iterable[tuple[bytes, bytes]]) -> list[list[str]]:
    """Return the hops of each field that is present, the nearest first."""
    forwarded: list[bytes] = []
    x_forwarded_for: list[bytes] = []
    for name, value in headers:
        if name == b"forwarded":
            forwarded += value.split(b",")
        elif name == b"x-forwarded-for":
            x_forwarded_for += value.split(b",")
    forwarded_for = [b"".join(_FOR.findall(element)[:1]) for element in forwarded[-MAX_HOPS:]]
    return [
        [hop.decode("latin-1").strip() for hop in reversed(hops)]
        for hops in (forwarded_for, x_forwarded_for[-MAX_HOPS:])
        if hops
    ]


def _parse_address(text: str) -> Address | None:
    match = _PORT.match(text)
    if match is not None:
        text = match["v6"] or match["v4"] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
