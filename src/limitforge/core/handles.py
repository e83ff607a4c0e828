"""Lease and reservation ids: opaque handles that list every bucket of the lease or reservation.

They are not signed. A service that receives them from untrusted clients must authenticate them first.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, TypeVar

import msgspec

from limitforge.core.calendar import Period, zone_exists
from limitforge.errors import InvalidInput

MAX_HANDLE_LENGTH = 262_144
"""The longest id of a check with 32 limits and a shadow plan."""

Handle = TypeVar("Handle", "Lease", "Reservation")


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The slots that one check holds. `local` is true if this process decided without the store and has the slots."""

    token: bytes
    keys: list[bytes]
    local: bool = False


class HeldLimit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One limit of a reservation. `calendar` is the (period, zone, anchor day) of a quota."""

    key: bytes
    name: str
    counts_requests: bool
    calendar: tuple[str, str, int] | None


class Reservation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a settlement needs: the key of the record, and the limits that are held."""

    token: bytes
    record_key: bytes
    limits: list[HeldLimit]
    local: bool = False


EMPTY_TOKEN = b"\0" * 8
"""The token of a reservation that was allowed without its store."""

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind).decode for kind in (Lease, Reservation)}


def empty_reservation(record: bytes) -> Reservation:
    """Return a reservation that holds nothing, so that settling it changes nothing."""
    return Reservation(EMPTY_TOKEN, record, [])


def encode_handle(handle: Lease | Reservation) -> str:
    """Return the id of a lease or reservation."""
    return urlsafe_b64encode(_encode(handle)).rstrip(b"=").decode()


def mark_local(kind: type[Handle], handle: str | None) -> str | None:
    """Return the same id, marked as made without the store."""
    return None if handle is None else encode_handle(msgspec.structs.replace(_decode(kind, handle), local=True))


def _decode(kind: type[Handle], handle: str) -> Handle:
    found: Handle = _decoders[kind](urlsafe_b64decode(handle + "=" * (-len(handle) % 4)))
    return found


def decode_handle(field: str, kind: type[Handle], handle: str, prefix: str) -> Handle:
    """Return the handle of an id.

    Raise `InvalidInput`, naming `field`, if the id is invalid or has a key without the prefix of this store.
    """
    if not isinstance(handle, str) or len(handle) > MAX_HANDLE_LENGTH:
        raise InvalidInput(field, f"must be a string of at most {MAX_HANDLE_LENGTH} characters")
    try:
        found: Handle = _decode(kind, handle)
    except (ValueError, TypeError, msgspec.MsgspecError):
        raise InvalidInput(field, f"is not a {kind.__name__.lower()} id") from None
    if isinstance(found, Reservation) and not all(
        limit.calendar is None or _is_calendar(limit.calendar) for limit in found.limits
    ):
        raise InvalidInput(field, "names a calendar that does not exist")
    keys = found.keys if isinstance(found, Lease) else [found.record_key, *(limit.key for limit in found.limits)]
    if not all(key.startswith(prefix.encode() + b":{") for key in keys):
        raise InvalidInput(field, "belongs to a store with another key prefix")
    return found


def _is_calendar(calendar: tuple[str, str, int]) -> bool:
    period, time_zone, anchor_day = calendar
    return period in tuple(Period) and 1 <= anchor_day <= 31 and zone_exists(time_zone)
