"""API keys and admin tokens: how they are made, read and recognised.

    lf_live_<id><secret><checksum>
             |   |       64 bits of an HMAC-SHA256 under the pepper: a made-up key is refused without a look-up
             |   166 bits, shown once
             what it is looked up by

Kept is an HMAC-SHA256 of the whole under a pepper. Peppers have versions, so that a new one can be brought in while
keys made under the old ones go on working.

Keys that were made before the checksum was keyed end with 6 digits of a CRC32, which anybody can compute. They keep
working, but only a look-up tells whether one was made up. The length tells the two kinds apart.
"""

import hmac
import secrets
import zlib
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from limitforge.catalog.model import Key, SecretHash, Token
from limitforge.errors import InvalidInput, UnknownKey

ID_LENGTH = 16
SECRET_LENGTH = 28
CHECKSUM_LENGTH = 11  # base62 digits, for 64 bits
CRC_LENGTH = 6  # of old keys
MIN_PEPPER_BYTES = 16
MAX_PEPPERS = 8  # versions at once: a made-up key costs an HMAC under each
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PREFIXES = {"live": "lf_live_", "test": "lf_test_", "admin": "lf_admin_"}

Holder = TypeVar("Holder", Key, Token)

_BODY_LENGTH = ID_LENGTH + SECRET_LENGTH
_MAX_LENGTH = max(map(len, PREFIXES.values())) + _BODY_LENGTH + CHECKSUM_LENGTH
_ALPHABET_SET = frozenset(ALPHABET)


def new_id(kind: str) -> str:
    """An id of the catalog, such as `ten_…`: 95 random bits."""
    return f"{kind}_{_random(ID_LENGTH)}"


class Credential(msgspec.Struct, frozen=True):
    """A key or token as somebody presents it. Its text never leaves it by accident."""

    prefix: str
    id: str
    """The part by which it is looked up, without the kind."""
    text: str
    has_keyed_checksum: bool = False
    """True if its checksum was made under a pepper: it was issued once, though it may have been deleted since."""

    @classmethod
    def generate(cls, prefix: str, identity: str, peppers: "Peppers") -> "Credential":
        body = prefix + identity + _random(SECRET_LENGTH)
        return cls(prefix, identity, body + peppers.checksum(body), has_keyed_checksum=True)

    @classmethod
    def parse(cls, text: str, peppers: "Peppers") -> "Credential":
        """Parse a presented key. Raises `UnknownKey` where its form or its checksum shows that it was never issued."""
        if isinstance(text, str) and len(text) <= _MAX_LENGTH:
            for prefix in PREFIXES.values():
                if text.startswith(prefix) and _ALPHABET_SET.issuperset(text[len(prefix) :]):
                    end = len(prefix) + _BODY_LENGTH
                    body, checksum = text[:end], text[end:]
                    is_keyed = len(checksum) == CHECKSUM_LENGTH
                    if peppers.verify_checksum(body, checksum) if is_keyed else checksum == crc_checksum(body):
                        return cls(prefix, body[len(prefix) :][:ID_LENGTH], text, is_keyed)
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
            if version < 1 or len(pepper) < MIN_PEPPER_BYTES:
                raise InvalidInput(
                    "peppers", f"version {version} must be above 0 and have {MIN_PEPPER_BYTES} or more bytes"
                )
        if len(by_version) > MAX_PEPPERS:
            raise InvalidInput("peppers", f"at most {MAX_PEPPERS} versions, got {len(by_version)}")
        self._by_version = dict(by_version)
        self.newest_version = max(self._by_version)
        self._checksum_keys = self.derive_keys(b"limitforge key checksum")

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

    def checksum(self, body: str) -> str:
        """Return the checksum of a new key under the newest pepper."""
        return _checksum(body, self._checksum_keys[0])

    def verify_checksum(self, body: str, checksum: str) -> bool:
        """Return True if this is its checksum under any version. Compares in constant time."""
        return any(hmac.compare_digest(_checksum(body, key), checksum) for key in self._checksum_keys)

    def hash_credential(self, credential: Credential, expires_at: datetime | None = None) -> SecretHash:
        """What is kept of it."""
        return SecretHash(self._digest(credential.text, self.newest_version), self.newest_version, expires_at)

    def authenticate(self, credential: Credential, holder: Holder | None, now: datetime) -> Holder:
        """The holder, if this is one of its secrets and still good. Whoever is wrong is told no more than that."""
        if holder is not None and (holder.expires_at is None or now < holder.expires_at):
            for kept in holder.secrets:
                if self.matches(credential, kept) and (kept.expires_at is None or now < kept.expires_at):
                    return holder
        raise UnknownKey("no such key, or it is no longer good")

    def derive_keys(self, purpose: bytes) -> list[bytes]:
        """Secrets for another purpose, one of each version, the newest first."""
        versions = sorted(self._by_version, reverse=True)
        return [hmac.digest(self._by_version[version], purpose, "sha256") for version in versions]

    def __repr__(self) -> str:
        return f"Peppers(versions={sorted(self._by_version)})"

    def matches(self, credential: Credential, stored: SecretHash) -> bool:
        """In constant time; False where the pepper is no longer known."""
        return stored.pepper in self._by_version and hmac.compare_digest(
            self._digest(credential.text, stored.pepper), stored.hash
        )

    def _digest(self, text: str, version: int) -> str:
        return hmac.digest(self._by_version[version], text.encode(), "sha256").hex()


def fingerprint(text: str) -> bytes:
    """What a presented key is remembered by in this process: not its text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def crc_checksum(body: str) -> str:
    """Return the checksum of a key that was made before the checksum was keyed."""
    return _base62(zlib.crc32(body.encode()), CRC_LENGTH)


def _random(length: int) -> str:
    """So many letters and digits; all from one random number, since an apply makes tens of thousands of ids."""
    return _base62(secrets.randbelow(len(ALPHABET) ** length), length)


def _checksum(body: str, key: bytes) -> str:
    return _base62(int.from_bytes(hmac.digest(key, body.encode(), "sha256")[:8]), CHECKSUM_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
