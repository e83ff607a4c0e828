"""Pages of lists, and the cursors between them."""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from limitforge.core.exact import short_repr
from limitforge.errors import InvalidInput

MAX_PAGE_SIZE = 1_000


class Page(msgspec.Struct, frozen=True):
    """A page of a list. Pass `cursor` to get the next page; it is None on the last one."""

    items: list[Any]
    cursor: str | None


def validate_page_size(size: int) -> int:
    """Return the size, or raise `InvalidInput`."""
    if type(size) is not int or not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidInput("page", f"must be from 1 to {MAX_PAGE_SIZE}, got {short_repr(size)}")
    return size


def encode_cursor(values: list[Any]) -> str:
    """Return a cursor with the sort key of the last item of a page."""
    return urlsafe_b64encode(msgspec.json.encode(values)).rstrip(b"=").decode()


# Cursors by the number of their parts. Callers can forge them, so the types exclude values that a database rejects.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**37)]
_Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0]*\Z")]
_CURSORS: Mapping[int, Any] = {1: tuple[_Number], 2: tuple[_Text, _Text], 3: tuple[_Seconds, _Text, _Text]}


def decode_cursor(cursor: str | None, parts: int) -> list[Any] | None:
    """Return the sort key in a cursor, or None for the first page. Raises `InvalidInput` for a malformed cursor."""
    if cursor is None:
        return None
    try:
        plain = b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        values = msgspec.json.decode(plain, type=_CURSORS[parts])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidInput("cursor", "is not one that a list returned") from None
    return list(values)
