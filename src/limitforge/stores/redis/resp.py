"""Encode calls as RESP, and translate the errors of Redis, for asyncio and threads alike.

The stores write and parse RESP themselves, with hiredis: a check is one call whose bytes are known, so a general client
would only add cost and its own timeouts. redis-py parses URLs, subscribes to channels and serves the catalog.
"""

import re
from collections.abc import Sequence
from typing import Any

import hiredis
import msgspec

from limitforge import lua
from limitforge.errors import StoreCorrupt, StoreError, StoreUnavailable
from limitforge.stores.errors import FULL_REASON, Redirected, SlotMigrating, SlotsNotTogether, StoreFull
from limitforge.stores.redis.script_call import ScriptCall, UnreplicatedReply, with_encoded_strings

_NO_PASSWORD = "the server needs a password: put user and password into the URL"  # noqa: S105
_NO_PERMISSION = "the user of the URL lacks a permission: see the ACL in docs/operations.md"
_BUSY = "another script has been running too long"

UNAVAILABLE_ERRORS = {
    "LOADING": "the server is loading its data",
    "READONLY": "the server is a replica, and only a master accepts writes",
    "OOM": FULL_REASON,
    "MASTERDOWN": "the server is a replica that lost its master",
    "NOAUTH": _NO_PASSWORD,
    "ERR Protocol error: unauthenticated": _NO_PASSWORD,
    "WRONGPASS": "the server rejected user and password of the URL",
    "NOPERM": _NO_PERMISSION,
    "ERR The user executing the script": _NO_PERMISSION,
    "BUSY": _BUSY,
    "CLUSTERDOWN": "the Cluster is down",
    "NOREPLICAS": "too few replicas are in sync (min-replicas-to-write)",
    "MISCONF": "the server cannot persist its data and therefore refuses writes",
    "UNKILLABLE": _BUSY,
    "ERR Script killed": "the script was killed (SCRIPT KILL)",
    "ERR max number of clients reached": "the server has reached its maximum of clients (maxclients)",
}
"""The errors that mean that Redis can't serve now, by how they start. Errors other than these and the redirections of a
Cluster raise `StoreCorrupt`."""

ASKING = b"*1\r\n$6\r\nASKING\r\n"


# -- requests


def encode_command(*command: str | int | bytes) -> bytes:
    encoded: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # the stub only allows tuples of one
    return encoded


def encode_call(call: ScriptCall) -> bytes:
    return _encode(("EVALSHA", lua.multi_slot_sha() if call.keys_per_slot else lua.sha()), call)


def encode_call_with_script(call: ScriptCall) -> bytes:
    """Encode a call for a server that does not have the script."""
    return _encode(("EVAL", lua.multi_slot_script() if call.keys_per_slot else lua.script()), call)


def _encode(command: tuple[str, str | bytes], call: ScriptCall) -> bytes:
    try:
        if call.keys_per_slot:
            return encode_command(*command, 0, *call.args, *call.keys, msgspec.msgpack.encode(call.keys_per_slot))
        return encode_command(*command, len(call.keys), *call.keys, *call.args)
    except UnicodeEncodeError:
        return _encode(command, with_encoded_strings(call))


# -- replies


def is_script_missing(reply: object) -> bool:
    """Return True if Redis does not have the script. Nothing was executed, so the call can be repeated."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def is_no_longer_master(reply: object) -> bool:
    """Return True if the server became a replica. A new connection may lead to the new master."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("READONLY", "MASTERDOWN"))


def is_replica_role(reply: object) -> bool:
    """Return True if a reply to ROLE comes from a replica. It must not decide, because its data may be outdated."""
    return isinstance(reply, list) and bool(reply) and reply[0] == b"slave"


def require_replicas(reply: Any, acknowledged: object, required: int) -> Any:
    """Return the reply to a call, marked as unreplicated if the WAIT after it counted too few replicas."""
    is_enough = isinstance(acknowledged, int) and acknowledged >= required
    if is_enough or isinstance(reply, StoreError | hiredis.ReplyError):
        return reply
    return UnreplicatedReply(reply, acknowledged, required)


# -- errors


_REDIRECTION = re.compile(r"(MOVED|ASK) (\d+) (.*):(\d+)$")


def translate_error(error: hiredis.ReplyError) -> StoreError:
    """Translate an error reply into a `StoreUnavailable` or a `StoreCorrupt`."""
    text = str(error)
    redirection = _REDIRECTION.match(text)
    if redirection is not None:
        word, slot, host, port = redirection.groups()
        return Redirected(int(slot), host, int(port), is_ask=word == "ASK")
    if text.startswith("ERR Script attempted"):
        return SlotsNotTogether("a slot of the Cluster has moved")
    if text.startswith("TRYAGAIN"):
        return SlotMigrating("a slot of the Cluster is migrating, and its keys are on two servers (TRYAGAIN)")
    for start, reason in UNAVAILABLE_ERRORS.items():
        if text.startswith(start):
            kind = StoreFull if start == "OOM" else StoreUnavailable
            return kind(f"Redis can't serve now: {reason} ({start})")
    return StoreCorrupt(f"Redis refused the script: {text}")


def should_split_by_slot(error: StoreError) -> bool:
    """Return True if a multi-slot call was refused, and a call for each slot may succeed for some of them."""
    words = ("OOM", "READONLY", "MISCONF", "NOREPLICAS")
    return isinstance(error, SlotsNotTogether) or any(f"({word})" in str(error) for word in words)


def connection_error(error: BaseException, *, maybe_counted: bool = False) -> StoreUnavailable:
    """Translate an error of the network."""
    text = str(error) or type(error).__name__
    return StoreUnavailable(f"Redis did not answer: {text}", maybe_counted=maybe_counted)


def handshake_error(replies: Sequence[object]) -> StoreError | None:
    """Return the first error in the replies to a handshake. Every such error means that the server can't serve now."""
    for reply in replies:
        if is_replica_role(reply):
            return StoreUnavailable("this Redis is a replica, and only its master accepts writes")
        if isinstance(reply, hiredis.ReplyError):
            error = translate_error(reply)
            return (
                error
                if isinstance(error, StoreUnavailable)
                else StoreUnavailable(f"Redis rejected the handshake: {reply}")
            )
    return None
