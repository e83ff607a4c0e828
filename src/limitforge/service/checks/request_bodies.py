"""Bodies: JSON, read more strictly than most do: what is the subject to one reader must be that to every other.

A body is refused before anything is built from it that no valid body needs: msgspec splits a batch into at most 1,000
checks that stay bytes, and stops at the next one; strings are counted before they are decoded.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from limitforge.catalog.conversion import translate_validation_error
from limitforge.core.plan import MAX_LIMITS
from limitforge.errors import InvalidInput
from limitforge.service.problems import HttpError

MAX_BATCH = 1_000
MAX_COSTS = 2 * MAX_LIMITS  # each limit by its name, and by its place and name
MAX_STRINGS = MAX_COSTS + 16  # of one check: those names, and the names and values of its fields

Body = TypeVar("Body")


class CheckBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What `POST /v1/check` takes."""

    resource: str
    subject: str
    cost: int = 1
    costs: dict[str, int] | None = None
    priority: str | None = None
    plan_id: str | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /v1/check/batch` takes."""

    checks: msgspec.Raw


# A list whose decoder stops at the first element too many. `Meta(max_length=...)` is looked at once all were decoded.
_BatchElements = msgspec.defstruct(
    "_Elements",
    [(f"check_{at}", msgspec.Raw, None) for at in range(MAX_BATCH)],
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
)

_decode_check_body = msgspec.json.Decoder(CheckBody).decode
_decode_batch_body = msgspec.json.Decoder(BatchBody).decode
_decode_elements = msgspec.json.Decoder(_BatchElements).decode
_decode_any = msgspec.json.Decoder(msgspec.Raw).decode
_decode_name = msgspec.json.Decoder(str).decode
_BATCH_START = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*("[^"]*")[ \t\r\n]*:[ \t\r\n]*')


def decode_small_check(body: bytes) -> CheckBody | None:
    """Return the body of a check if it is valid and has few strings, else None.

    Resource and subject alone have eight quotes, a third field that is not text two more: so few leave no room for a
    name that is there twice.
    """
    if body.count(b'"') <= 10:
        try:
            return _decode_check_body(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # `read_check` finds out what is wrong
    return None


def decode_check(body: bytes) -> CheckBody:
    """Return the body of a check; raise what is wrong with it."""
    return decode_body(_decode_check_body, body)


def decode_body(decode: Callable[[bytes], Body], body: bytes) -> Body:
    """Return the body of a call that takes one check at most."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:  # quotes that are not escaped: two for each string
        detail = f"costs: at most {MAX_COSTS} names; this has more strings than any check"
        raise HttpError(400, "malformed_json", detail)
    found = _decode(decode, body)
    reject_duplicate_names(body)
    return found


def split_batch(body: bytes) -> list[msgspec.Raw]:
    """Return the checks of a batch, to be read one by one. Their syntax is checked, but not that they are UTF-8."""
    start = _BATCH_START.match(body)
    rest = body.rstrip(b" \t\r\n")
    if start is not None and rest.endswith(b"}"):
        try:
            if _decode_name(start[1]) == "checks":
                found = msgspec.structs.astuple(_decode_elements(rest[start.end() : -1]))
                return [each for each in found if each is not None]
        except msgspec.ValidationError:
            if rest[start.end()] == ord("["):
                raise InvalidInput("checks", f"at most {MAX_BATCH} in one batch") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # `_wrong_batch` finds out what is wrong
    raise _batch_error(body)


def _batch_error(body: bytes) -> InvalidInput | HttpError:
    """Return what is wrong with a batch that can't be split, or raise it."""
    checks = bytes(_decode(_decode_batch_body, body).checks)
    try:
        _decode_elements(checks)
    except msgspec.ValidationError as error:
        return InvalidInput("checks", translate_validation_error(error).problem)
    return _duplicate_name("checks")


def _decode(decode: Callable[[bytes], Body], body: bytes) -> Body:
    try:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            _decode_any(body)  # what is not JSON is reported before what is wrong with a field
            str(body, "utf-8")
            raise translate_validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise HttpError(400, "malformed_json", "it is nested too deeply") from None


def reject_duplicate_names(body: bytes) -> None:
    """Raise BadRequest for a name that comes twice in an object: readers differ on which of them counts.

    `body` must be valid JSON with a bounded number of values, since all of them are built.
    """
    json.loads(body, object_pairs_hook=_check_unique, parse_int=str, parse_float=str)


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise _duplicate_name(name)
        names.add(name)


def _duplicate_name(name: str) -> HttpError:
    return HttpError(400, "malformed_json", f"{name[:64]!r} is there twice")
