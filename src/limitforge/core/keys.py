"""Bucket keys: injective, readable, and hash-tagged by placement.

    lf:{acme}:sp:11:GET:/orders:7:user:42:burst:t
    |  |      || |              |         |     algorithm
    |  |      || |              |         limit name
    |  |      || |              subject, behind its length
    |  |      || resource, behind its length
    |  |      |place of the plan in the join
    |  |      scope
    |  placement: everything of a tenant in one slot
    prefix

Lengths come before the parts that may hold any character, so no two tuples make the same key. Inside the process a key
is `str`; bytes from outside that are not UTF-8 are carried by surrogate escapes, which the encoder turns back into the
same bytes.
"""

import hashlib
import re
from enum import StrEnum
from functools import lru_cache

from limitforge.core.exact import shown
from limitforge.core.limits import Scope
from limitforge.errors import InvalidInput

MAX_BYTES = 512
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D", "/": "%2F"})
_EMPTY_TENANT = "%-"  # an empty tag would not be one; "%" is always followed by two digits in an escaped tenant
_GLOBAL = "%"
_SUBJECT = Scope.SUBJECT  # looking up a member of an enum takes longer than the rest of a comparison


class Place(StrEnum):
    """Which place a plan has among those that join in a check: limits of equal names in different places are apart."""

    OPERATOR = "o"
    TENANT = "t"
    POLICY = "p"
    SHADOW = "s"


class Keys:
    """Makes every key of one store: all start with the same prefix."""

    def __init__(self, prefix: str = "lf") -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise InvalidInput("key_prefix", f"must be 1 to 64 letters, digits or -_.: characters, got {shown(prefix)}")
        self.prefix = prefix
        self.tenants = lru_cache(maxsize=8_192)(self._tenant)

    def tenant(self, tenant: str | bytes) -> str:
        """What all keys of a tenant start with."""
        try:
            return self.tenants(tenant)
        except TypeError:  # not hashable
            raise InvalidInput("tenant", f"must be a string, got {type(tenant).__name__}") from None

    def _tenant(self, tenant: str | bytes) -> str:
        name = text("tenant", tenant)
        return f"{self.prefix}:{{{name.translate(_ESCAPED) or _EMPTY_TENANT}}}:"

    def bucket(self, scope: Scope, place: str, tenant: str, resource: str, subject: str) -> str:
        """All of a bucket's key but its limit; `tenant` as that method returned it, `place` by its letter."""
        if scope is _SUBJECT:
            return f"{tenant}s{place}:{len(resource)}:{resource}:{len(subject)}:{subject}:"
        if scope is Scope.CALLER:
            return f"{tenant}c{place}:{len(subject)}:{subject}:"
        if scope is Scope.RESOURCE:
            return f"{tenant}r{place}:{len(resource)}:{resource}:"
        if scope is Scope.TENANT:
            return f"{tenant}t{place}:"
        return f"{self.prefix}:{{{_GLOBAL}}}:g{place}:"

    def unprefixed(self, key: str) -> str:
        """The key as any store would have it."""
        return key[len(self.prefix) + 1 :]

    @staticmethod
    def overrides(tenant: str, subject: str) -> str:
        """Where all overrides of one subject are."""
        return f"{tenant}o:{subject}"

    @staticmethod
    def override_index(tenant: str) -> str:
        """Which subjects of a tenant have overrides."""
        return f"{tenant}x"

    @staticmethod
    def reservation(tenant: str, token: bytes) -> str:
        return f"{tenant}v:{token.hex()}"


def text(field: str, value: str | bytes) -> str:
    """A part of a key from outside, bounded; bytes that are not UTF-8 survive as they are."""
    if type(value) is str:
        if value.isascii():
            if len(value) <= MAX_BYTES:
                return value
            raise InvalidInput(field, f"at most {MAX_BYTES} bytes, got {len(value)}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise InvalidInput(field, "must be valid Unicode; pass bytes for anything else") from None
        if size <= MAX_BYTES:
            return value
        raise InvalidInput(field, f"at most {MAX_BYTES} bytes of UTF-8, got {size}")
    if isinstance(value, bytes):
        if len(value) <= MAX_BYTES:
            return value.decode("utf-8", "surrogateescape")
        raise InvalidInput(field, f"at most {MAX_BYTES} bytes, got {len(value)}")
    if isinstance(value, str):
        return text(field, str.__str__(value))  # an enum of strings is its value
    raise InvalidInput(field, f"must be a string, got {type(value).__name__}")


def encoded(key: str) -> bytes:
    """The key as it goes over the wire."""
    return key.encode("utf-8", "surrogateescape")


def spread_offset(key: str) -> int:
    """The phase of a spread window: 48 bits of its key's hash."""
    return int.from_bytes(hashlib.sha1(encoded(key), usedforsecurity=False).digest()[:6], "big")


def decoded(key: bytes) -> str:
    """The opposite of `encoded`."""
    return key.decode("utf-8", "surrogateescape")
