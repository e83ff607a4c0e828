"""Bodies: JSON, read more strictly than most do: what is the subject to one reader must be that to every other."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from limitforge.catalog.model import refusal
from limitforge.service.problems import BadRequest

Body = TypeVar("Body")


class CheckBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What `POST /v1/check` takes."""

    resource: str
    subject: str
    cost: int = 1
    costs: dict[str, int] | None = None
    priority: str | None = None
    plan_id: str | None = None


_check_body = msgspec.json.Decoder(CheckBody).decode
_plain = msgspec.json.Decoder().decode


def read_check(body: bytes) -> CheckBody:
    """The body of a check. Resource and subject alone have eight quotes, a third field that is no text two more: so
    few leave no room for a name that is there twice.
    """
    is_plain = body.count(b'"') <= 10
    if is_plain:
        try:
            return _check_body(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # what is wrong is said by whoever reads it again
    return _decoded(_check_body, body, is_plain=is_plain)


def read(decode: Callable[[bytes], Body], body: bytes) -> Body:
    """Any other body."""
    return _decoded(decode, body, is_plain=False)


def _decoded(decode: Callable[[bytes], Body], body: bytes, *, is_plain: bool) -> Body:
    try:
        try:
            found = decode(body)
            if not is_plain:
                look_through(body)
            return found
        except msgspec.ValidationError as error:
            _plain(body)  # what is no JSON at all is said before what makes no sense in it
            raise refusal(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise BadRequest(400, "malformed_json", "it is nested too deeply") from None


def look_through(body: bytes) -> None:
    """For names that are there twice: readers differ on which of them counts."""
    json.loads(body, object_pairs_hook=_once, parse_int=str, parse_float=str)


def _once(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise BadRequest(400, "malformed_json", f"{name[:64]!r} is there twice")
        names.add(name)
