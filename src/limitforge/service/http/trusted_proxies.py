"""Who asks, where proxies stand between: their word counts only if they are listed, and is read from the right.

X-Forwarded-For: made-up, 203.0.113.7, 10.0.0.2      10.0.0.0/8 is listed, so it was 203.0.113.7
Forwarded: for=203.0.113.7;proto=https, for=10.0.0.2
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from limitforge.core.exact import short_repr
from limitforge.errors import InvalidInput

MAX_HOPS = 32  # that are looked at

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_FOR = re.compile(rb'(?:^|;)\s*for\s*=\s*"?([^";]*)', re.IGNORECASE)
_PORT = re.compile(r"^(?:\[(?P<v6>[^\]]*)\](?::\d+)?|(?P<v4>[\d.]+):\d+)$")


class TrustedProxies:
    """The proxies that are believed."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    @classmethod
    def parse(cls, text: str) -> "TrustedProxies":
        """Addresses and networks, such as `10.0.0.0/8, ::1`."""
        networks = []
        for word in filter(None, (word.strip() for word in text.split(","))):
            try:
                networks.append(ip_network(word))
            except ValueError:
                said = "must be addresses or networks, such as 10.0.0.0/8,::1"
                raise InvalidInput("trusted_proxies", f"{said}, got {short_repr(word)}") from None
        return cls(networks)

    def client_address(self, client: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Where a request comes from, that `client` has sent. What is no address ends the search. A proxy that passes
        one field on as a client made it up, beside the other that it wrote itself, is believed in neither.
        """
        if not self._networks or not self._is_trusted(_parse_address(client)):
            return client
        told = {self._first_untrusted(client, hops) for hops in _forwarded_hops(headers)}
        return told.pop() if len(told) == 1 else client

    def _first_untrusted(self, client: str, hops: Iterable[str]) -> str:
        source = client
        for hop in hops:
            address = _parse_address(hop)
            if address is None:
                return source
            source = str(address)
            if not self._is_trusted(address):
                return source
        return source

    def _is_trusted(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _forwarded_hops(headers: Iterable[tuple[bytes, bytes]]) -> list[list[str]]:
    """As each field that is there tells them, the nearest first."""
    forwarded: list[bytes] = []
    x_forwarded_for: list[bytes] = []
    for name, value in headers:
        if name == b"forwarded":
            forwarded += value.split(b",")
        elif name == b"x-forwarded-for":
            x_forwarded_for += value.split(b",")
    words = [b"".join(_FOR.findall(element)[:1]) for element in forwarded[-MAX_HOPS:]]
    return [
        [word.decode("latin-1").strip() for word in reversed(told)]
        for told in (words, x_forwarded_for[-MAX_HOPS:])
        if told
    ]


def _parse_address(text: str) -> Address | None:
    found = _PORT.match(text)
    if found is not None:
        text = found["v6"] or found["v4"] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
