"""One call of the Lua script: its keys and arguments, and the frame of its reply.

A flow is a generator that yields calls, receives their replies, and returns the result of an operation. The asyncio
store and the threaded store only send the calls.
"""

import logging
from collections.abc import Generator, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from limitforge.core.keys import encode_key
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreUnavailable
from limitforge.observability.events import log_event
from limitforge.stores.errors import NotReplicated

SERVER_TIME = -1  # Redis reads its own clock

T = TypeVar("T")


class ScriptCall(NamedTuple):
    """KEYS and ARGV of one call of the script. A `str` is sent as UTF-8, its surrogate escapes as bytes.

    The reply ends with `call_id`. If a proxy loses a reply, the next reply is not taken for the lost one.
    """

    keys: Sequence[str | bytes]
    args: Sequence[str | bytes]
    call_id: int
    keys_per_slot: tuple[int, ...] = ()
    """Number of keys in each slot, in the order of the keys; empty if all keys are in one slot."""


class UnreplicatedReply(NamedTuple):
    """A reply whose writes too few replicas have confirmed. A debit may be lost; a denial or a peek is valid."""

    reply: Any
    replicas: object
    wanted: int

    def to_error(self) -> StoreUnavailable:
        message = f"{self.replicas} of {self.wanted} replicas confirmed the write"
        return NotReplicated(message, maybe_counted=True)


Reply = bytes | list[Any] | UnreplicatedReply
Flow = Generator[ScriptCall, Reply, T]

_log = logging.getLogger(__name__)
_call_ids = count(1)
_MAX_CALL_ID = 2**31
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


def make_call(request: tuple[Any, ...], keys: Sequence[str | bytes], strings: Iterable[str | bytes] = ()) -> ScriptCall:
    """Return a call of the script with a new call id."""
    call_id = next(_call_ids) % _MAX_CALL_ID
    return ScriptCall(keys, [_encode((*request, call_id)), *strings], call_id)


def decode_reply(call: ScriptCall, reply: Reply) -> list[int]:
    """Return the integers that the script replied to this call, or raise if this is the reply to another call."""
    if isinstance(reply, UnreplicatedReply):
        raise reply.to_error()
    values: list[int] = []
    if not isinstance(reply, int):  # an integer can only be a late reply to PUBLISH
        try:
            values = _decode(cast("bytes", reply))
        except (msgspec.MsgspecError, TypeError):
            raise invalid_reply_error() from None
    if not values or values.pop() != call.call_id:
        raise StoreUnavailable("received the reply to another call", maybe_counted=True)
    return values


def invalid_reply_error() -> StoreCorrupt:
    return StoreCorrupt("the reply to the script is invalid; check whether a proxy or another server replies for Redis")


def as_internal_error(error: Exception) -> LimitforgeError:
    """Return the error for a reply that could not be decoded, or for a bug. Log an error that is not one of ours."""
    if isinstance(error, LimitforgeError):
        return error
    log_event(_log, logging.ERROR, "store.corrupt_reply", "could not decode a reply of the script", exc_info=error)
    return StoreCorrupt(f"could not decode a reply of the script: {type(error).__name__}")


def foreign_value_error(what: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{what} holds a value that limitforge did not write; check which other program uses this key prefix"
    )


def single_call_flow(call: ScriptCall) -> Flow[Reply]:
    """Send one call and return its reply as it is."""
    return (yield call)


def with_encoded_strings(call: ScriptCall) -> ScriptCall:
    """Return the call with all strings as bytes, for those that plain UTF-8 can't encode."""
    keys, args = ([encode_key(s) if isinstance(s, str) else s for s in strings] for strings in (call.keys, call.args))
    return ScriptCall(keys, args, call.call_id, call.keys_per_slot)
