"""Lease and reservation ids: opaque to the caller, and enough by themselves to find every bucket that they hold.

They are not signed: whoever takes them from strangers must authenticate them first.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, TypeVar

import msgspec

from limitforge.core.calendar import Period, zone_exists
from limitforge.errors import InvalidInput

MAX_HANDLE_LENGTH = 262_144  # the longest that a check of 32 limits and its shadow can make

Handle = TypeVar("Handle", "Lease", "Reservation")


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The slots that one check holds; `local` if they are of the process that decided without its store."""

    token: bytes
    keys: list[bytes]
    local: bool = False


class HeldLimit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One limit of a reservation; `calendar` is (period, zone, anchor day) of a quota."""

    key: bytes
    name: str
    requests: bool
    calendar: tuple[str, str, int] | None


class Reservation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is needed to settle: where its record is, and which limits it holds."""

    token: bytes
    record: bytes
    limits: list[HeldLimit]
    local: bool = False


EMPTY_TOKEN = b"\0" * 8  # the token of a reservation that was let pass without its store

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind).decode for kind in (Lease, Reservation)}


def empty_reservation(record: bytes) -> Reservation:
    """A reservation that holds nothing anywhere: settling it changes nothing."""
    return Reservation(EMPTY_TOKEN, record, [])


def encode_handle(ticket: Lease | Reservation) -> str:
    return urlsafe_b64encode(_encode(ticket)).rstrip(b"=").decode()


def mark_local(kind: type[Handle], ticket: str | None) -> str | None:
    """The same id for what was handed out without the store."""
    return None if ticket is None else encode_handle(msgspec.structs.replace(_decode(kind, ticket), local=True))


def _decode(kind: type[Handle], ticket: str) -> Handle:
    found: Handle = _decoders[kind](urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4)))
    return found


def decode_handle(field: str, kind: type[Handle], ticket: str, prefix: str) -> Handle:
    """The ticket behind an id; refused unless all that it names lies under this store's prefix."""
    if not isinstance(ticket, str) or len(ticket) > MAX_HANDLE_LENGTH:
        raise InvalidInput(field, f"must be a string of at most {MAX_HANDLE_LENGTH} characters")
    try:
        found: Handle = _decode(kind, ticket)
    except (ValueError, TypeError, msgspec.MsgspecError):
        raise InvalidInput(field, f"is not a {kind.__name__.lower()} id") from None
    if isinstance(found, Reservation) and not all(
        limit.calendar is None or _is_calendar(limit.calendar) for limit in found.limits
    ):
        raise InvalidInput(field, "names a calendar that does not exist")
    keys = found.keys if isinstance(found, Lease) else [found.record, *(limit.key for limit in found.limits)]
    if not all(key.startswith(prefix.encode() + b":{") for key in keys):
        raise InvalidInput(field, "belongs to a store with another key prefix")
    return found


def _is_calendar(calendar: tuple[str, str, int]) -> bool:
    period, time_zone, anchor_day = calendar
    return period in tuple(Period) and 1 <= anchor_day <= 31 and zone_exists(time_zone)
