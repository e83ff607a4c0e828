"""API keys and admin tokens: how they are made, read and recognised.

    lf_live_<id><secret><checksum>
             |   |       CRC32, so that a typo is refused without a look-up
             |   166 bits, shown once
             what it is looked up by

Kept is an HMAC-SHA256 of the whole under a pepper. Peppers have versions, so that a new one can be brought in while
keys made under the old ones go on working.
"""

import hmac
import secrets
import zlib
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from limitforge.catalog.model import Key, Secret, Token
from limitforge.errors import InvalidInput, UnknownKey

ID_LENGTH = 16
SECRET_LENGTH = 28
CHECKSUM_LENGTH = 6
MIN_PEPPER = 16
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PREFIXES = {"live": "lf_live_", "test": "lf_test_", "admin": "lf_admin_"}

Holder = TypeVar("Holder", Key, Token)

_LENGTH = ID_LENGTH + SECRET_LENGTH + CHECKSUM_LENGTH
_LONGEST = max(map(len, PREFIXES.values())) + _LENGTH
_KNOWN = frozenset(ALPHABET)


def new_id(kind: str) -> str:
    """An id of the catalog, such as `ten_…`: 95 random bits."""
    return f"{kind}_{_random(ID_LENGTH)}"


class Credential(msgspec.Struct, frozen=True):
    """A key or token as somebody presents it. Its text never leaves it by accident."""

    prefix: str
    id: str
    """The part by which it is looked up, without the kind."""
    text: str

    @classmethod
    def make(cls, prefix: str, identity: str) -> "Credential":
        body = prefix + identity + _random(SECRET_LENGTH)
        return cls(prefix, identity, body + _checksum(body))

    @classmethod
    def read(cls, text: str) -> "Credential":
        """Refused without a look-up where it can't be one of ours."""
        if isinstance(text, str) and len(text) <= _LONGEST:
            for prefix in PREFIXES.values():
                if text.startswith(prefix):
                    body = text[:-CHECKSUM_LENGTH]
                    rest = text[len(prefix) :]
                    if len(rest) == _LENGTH and _KNOWN.issuperset(rest) and _checksum(body) == text[-CHECKSUM_LENGTH:]:
                        return cls(prefix, rest[:ID_LENGTH], text)
        raise UnknownKey("no such key")

    def __repr__(self) -> str:
        return f"Credential({self.prefix}{self.id}…)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("id", f"{self.prefix}{self.id}…")]

    __str__ = __repr__


class Peppers:
    """What secrets are hashed under, by version; the newest makes, all of them recognise."""

    def __init__(self, by_version: Mapping[int, bytes]) -> None:
        if not by_version:
            raise InvalidInput("peppers", "at least one is needed, such as '1:' and 32 random characters")
        for version, pepper in by_version.items():
            if version < 1 or len(pepper) < MIN_PEPPER:
                raise InvalidInput("peppers", f"version {version} must be above 0 and have {MIN_PEPPER} or more bytes")
        self._by_version = dict(by_version)
        self.newest = max(self._by_version)

    @classmethod
    def parse(cls, text: str) -> "Peppers":
        """`1:first,2:second`: versions and their secrets, the highest being the one in use."""
        found: dict[int, bytes] = {}
        for at, part in enumerate(filter(None, (each.strip() for each in text.split(",")))):
            version, colon, pepper = part.partition(":")
            if not colon or not version.isascii() or not version.isdigit() or len(version) > 9 or int(version) in found:
                raise InvalidInput("peppers", f"number {at + 1} must be a version of its own, a colon and a secret")
            try:
                found[int(version)] = pepper.encode()
            except UnicodeEncodeError:
                raise InvalidInput("peppers", f"number {at + 1} must be valid UTF-8") from None
        return cls(found)

    @staticmethod
    def generate() -> str:
        """The text of a new first pepper."""
        return f"1:{_random(43)}"

    def seal(self, credential: Credential, expires_at: datetime | None = None) -> Secret:
        """What is kept of it."""
        return Secret(self._digest(credential.text, self.newest), self.newest, expires_at)

    def identify(self, credential: Credential, holder: Holder | None, now: datetime) -> Holder:
        """The holder, if this is one of its secrets and still good. Whoever is wrong is told no more than that."""
        if holder is not None and (holder.expires_at is None or now < holder.expires_at):
            for kept in holder.secrets:
                if self.recognises(credential, kept) and (kept.expires_at is None or now < kept.expires_at):
                    return holder
        raise UnknownKey("no such key, or it is no longer good")

    def derived(self, purpose: bytes) -> list[bytes]:
        """Secrets for another purpose, one of each version, the newest first."""
        versions = sorted(self._by_version, reverse=True)
        return [hmac.digest(self._by_version[version], purpose, "sha256") for version in versions]

    def __repr__(self) -> str:
        return f"Peppers(versions={sorted(self._by_version)})"

    def recognises(self, credential: Credential, kept: Secret) -> bool:
        """In constant time; False where the pepper is no longer known."""
        return kept.pepper in self._by_version and hmac.compare_digest(
            self._digest(credential.text, kept.pepper), kept.hash
        )

    def _digest(self, text: str, version: int) -> str:
        return hmac.digest(self._by_version[version], text.encode(), "sha256").hex()


def fingerprint(text: str) -> bytes:
    """What a presented key is remembered by in this process: not its text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _random(length: int) -> str:
    """So many letters and digits; all from one random number, since an apply makes tens of thousands of ids."""
    number, digits = secrets.randbelow(len(ALPHABET) ** length), []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(digits)


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
