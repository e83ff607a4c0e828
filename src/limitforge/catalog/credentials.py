"""Generate, parse and verify API keys and admin tokens.

    lf_live_<id><secret><checksum>
             |   |       64 bits of an HMAC-SHA256 under the pepper: forged keys are rejected without a lookup
             |   166 bits, shown once
             the id, which is used for the lookup

The database stores an HMAC-SHA256 of the whole text under a pepper. Peppers have versions, so that a new pepper can be
introduced while keys under the old ones remain valid.

Older keys end with 6 digits of a CRC32, which is not secret. They remain valid, but only a lookup shows that one is
forged. The length tells the two formats apart.
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
CRC_LENGTH = 6  # older keys
MIN_PEPPER_BYTES = 16
MAX_PEPPERS = 8  # versions at once: a forged key costs an HMAC under each
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PREFIXES = {"live": "lf_live_", "test": "lf_test_", "admin": "lf_admin_"}

KeyOrToken = TypeVar("KeyOrToken", Key, Token)

_BODY_LENGTH = ID_LENGTH + SECRET_LENGTH
_MAX_LENGTH = max(map(len, PREFIXES.values())) + _BODY_LENGTH + CHECKSUM_LENGTH
_ALPHABET_SET = frozenset(ALPHABET)


def new_id(kind: str) -> str:
    """Return a random id of 95 bits, such as `ten_…`."""
    return f"{kind}_{_random(ID_LENGTH)}"


class Credential(msgspec.Struct, frozen=True):
    """An API key or admin token in plain text. Its repr never shows the secret."""

    prefix: str
    id: str
    """The id that is used for the lookup, without the prefix of its kind."""
    text: str
    has_keyed_checksum: bool = False
    """True if its checksum is keyed with a pepper. Such a key was issued by this service, but may have been deleted."""

    @classmethod
    def generate(cls, prefix: str, identity: str, peppers: "Peppers") -> "Credential":
        body = prefix + identity + _random(SECRET_LENGTH)
        return cls(prefix, identity, body + peppers.checksum(body), has_keyed_checksum=True)

    @classmethod
    def parse(cls, text: str, peppers: "Peppers") -> "Credential":
        """Parse a presented key. Raises `UnknownKey` if its form or its checksum shows that it was never issued."""
        if isinstance(text, str) and len(text) <= _MAX_LENGTH:
            for prefix in PREFIXES.values():
                if text.startswith(prefix) and _ALPHABET_SET.issuperset(text[len(prefix) :]):
                    end = len(prefix) + _BODY_LENGTH
                    body, checksum = text[:end], text[end:]
                    is_keyed = len(checksum) == CHECKSUM_LENGTH
                    if peppers.verify_checksum(body, checksum) if is_keyed else checksum == crc_checksum(body):
                        return cls(prefix, body[len(prefix) :][:ID_LENGTH], text, is_keyed)
        raise UnknownKey("unknown key")

    def __repr__(self) -> str:
        return f"Credential({self.prefix}{self.id}…)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("id", f"{self.prefix}{self.id}…")]

    __str__ = __repr__


class Peppers:
    """The peppers by version. New hashes use the newest one, verification accepts all of them."""

    def __init__(self, by_version: Mapping[int, bytes]) -> None:
        if not by_version:
            raise InvalidInput("peppers", "need at least one version, such as '1:' and 32 random characters")
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
        """Parse `1:first,2:second`: versions and their secrets. The highest version is used for new hashes."""
        found: dict[int, bytes] = {}
        for index, part in enumerate(filter(None, (each.strip() for each in text.split(",")))):
            version, colon, pepper = part.partition(":")
            if not colon or not version.isascii() or not version.isdigit() or len(version) > 9 or int(version) in found:
                raise InvalidInput("peppers", f"entry {index + 1} must be a unique version, a colon and a secret")
            try:
                found[int(version)] = pepper.encode()
            except UnicodeEncodeError:
                raise InvalidInput("peppers", f"entry {index + 1} must be valid UTF-8") from None
        return cls(found)

    @staticmethod
    def generate_text() -> str:
        """Return the text of a new first pepper."""
        return f"1:{_random(43)}"

    def checksum(self, body: str) -> str:
        """Return the checksum of a new key under the newest pepper."""
        return _checksum(body, self._checksum_keys[0])

    def verify_checksum(self, body: str, checksum: str) -> bool:
        """Return True if this is the checksum of a key under any version. Compares in constant time."""
        return any(hmac.compare_digest(_checksum(body, key), checksum) for key in self._checksum_keys)

    def hash_credential(self, credential: Credential, expires_at: datetime | None = None) -> SecretHash:
        """Return what the database stores of a credential."""
        return SecretHash(self._digest(credential.text, self.newest_version), self.newest_version, expires_at)

    def authenticate(self, credential: Credential, holder: KeyOrToken | None, now: datetime) -> KeyOrToken:
        """Return the holder if this is one of its valid secrets. Raises `UnknownKey` without a reason."""
        if holder is not None and (holder.expires_at is None or now < holder.expires_at):
            for stored in holder.secrets:
                if self.matches(credential, stored) and (stored.expires_at is None or now < stored.expires_at):
                    return holder
        raise UnknownKey("unknown or expired key")

    def derive_keys(self, purpose: bytes) -> list[bytes]:
        """Derive a secret for another purpose from each version, the newest first."""
        versions = sorted(self._by_version, reverse=True)
        return [hmac.digest(self._by_version[version], purpose, "sha256") for version in versions]

    def __repr__(self) -> str:
        return f"Peppers(versions={sorted(self._by_version)})"

    def matches(self, credential: Credential, stored: SecretHash) -> bool:
        """Compare in constant time. Returns False if the pepper of the stored hash is not configured any more."""
        return stored.pepper in self._by_version and hmac.compare_digest(
            self._digest(credential.text, stored.pepper), stored.hash
        )

    def _digest(self, text: str, version: int) -> str:
        return hmac.digest(self._by_version[version], text.encode(), "sha256").hex()


def require_peppers(peppers: Peppers | None) -> Peppers:
    """Return the peppers, or raise `InvalidInput` if none are configured."""
    if peppers is None:
        raise InvalidInput(
            "peppers", "are needed for keys and tokens: set LIMITFORGE_PEPPERS, such as '1:' and 32 random characters"
        )
    return peppers


def fingerprint(text: str) -> bytes:
    """Return a digest that identifies a presented key in memory, so that the process does not keep its text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def crc_checksum(body: str) -> str:
    """Return the CRC32 checksum of an older key."""
    return _base62(zlib.crc32(body.encode()), CRC_LENGTH)


def _random(length: int) -> str:
    """Return random letters and digits. One call for all of them, since an apply may need tens of thousands of ids."""
    return _base62(secrets.randbelow(len(ALPHABET) ** length), length)


def _checksum(body: str, key: bytes) -> str:
    return _base62(int.from_bytes(hmac.digest(key, body.encode(), "sha256")[:8]), CHECKSUM_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
