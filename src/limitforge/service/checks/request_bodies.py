"""Decode JSON bodies strictly and in bounded memory.

Strict: duplicate names are an error, because JSON parsers differ on which value counts, and a proxy must not see
another subject than this service.

Bounded: an invalid body is rejected before it takes more memory than a valid one. msgspec splits a batch into at most
1,000 checks that stay bytes, and stops at the next one. Strings are counted before they are decoded.
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
MAX_COSTS = 2 * MAX_LIMITS  # each limit by its name and by its qualified name
MAX_STRINGS = MAX_COSTS + 16  # in one check: the names of costs, and the names and values of its fields

Body = TypeVar("Body")


class CheckBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The body of `POST /v1/check`."""

    resource: str
    subject: str
    cost: int = 1
    costs: dict[str, int] | None = None
    priority: str | None = None
    plan_id: str | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/check/batch`."""

    checks: msgspec.Raw


# A list whose decoder stops at the first element too many. `Meta(max_length=...)` is checked only after all elements
# were decoded.
_BatchElements = msgspec.defstruct(
    "_Elements",
    [(f"check_{index}", msgspec.Raw, None) for index in range(MAX_BATCH)],
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
    """Return the body of a check if it is valid and has at most ten quotes, else None.

    A valid check has eight quotes around the names and values of resource and subject, and two around each further
    name. So with at most ten it has no duplicate name, and needs no second pass.
    """
    if body.count(b'"') <= 10:
        try:
            return _decode_check_body(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # `decode_check` finds out what is wrong
    return None


def decode_check(body: bytes) -> CheckBody:
    """Return the body of a check. Raises InvalidInput or HttpError if it is not valid."""
    return decode_body(_decode_check_body, body)


def decode_body(decode: Callable[[bytes], Body], body: bytes) -> Body:
    """Return the body of a request for at most one check. Raises InvalidInput or HttpError if it is not valid."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:  # each string has two unescaped quotes
        detail = f"costs: at most {MAX_COSTS} names; the body has more strings than any valid check"
        raise HttpError(400, "malformed_json", detail)
    found = _decode(decode, body)
    reject_duplicate_names(body)
    return found


def split_batch(body: bytes) -> list[msgspec.Raw]:
    """Return the checks of a batch as JSON. Their syntax is valid, but they may not be valid UTF-8."""
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
            pass  # `_batch_error` finds out what is wrong
    raise _batch_error(body)


def _batch_error(body: bytes) -> InvalidInput | HttpError:
    """Return the error of a batch that can't be split. Raises it if the body as a whole is not valid."""
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
            _decode_any(body)  # a syntax error takes precedence over an invalid field
            str(body, "utf-8")
            raise translate_validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise HttpError(400, "malformed_json", "the body is nested too deeply") from None


def reject_duplicate_names(body: bytes) -> None:
    """Raise HttpError if an object has a name twice.

    `body` must be valid JSON with a bounded number of values, since this builds all of them.
    """
    json.loads(body, object_pairs_hook=_check_unique, parse_int=str, parse_float=str)


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise _duplicate_name(name)
        names.add(name)


def _duplicate_name(name: str) -> HttpError:
    return HttpError(400, "malformed_json", f"duplicate name {name[:64]!r}")
