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
    found = _decoded(_check_body, body)
    if body.count(b'"') > 10:
        _look_through(body)
    return found


def read(decode: Callable[[bytes], Body], body: bytes) -> Body:
    """Any other body."""
    found = _decoded(decode, body)
    _look_through(body)
    return found


def _decoded(decode: Callable[[bytes], Body], body: bytes) -> Body:
    try:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            _plain(body)  # what is no JSON at all is said before what makes no sense in it
            raise refusal(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise BadRequest(400, "malformed_json", "it is nested too deeply") from None


def _look_through(body: bytes) -> None:
    """For names that are there twice: readers differ on which of them counts."""
    json.loads(body, object_pairs_hook=_once, parse_int=str, parse_float=str)


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise BadRequest(400, "malformed_json", f"{twice[:64]!r} is there twice")
