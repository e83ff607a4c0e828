"""What both Redis shells share, without any I/O: where a URL leads, what is said there first, and what errors mean.

The shells write and read RESP by themselves (hiredis packs and parses it): a check is one call whose bytes are known,
so nothing of a general client is needed for it, and the shell alone decides how long it waits. redis-py reads the URL
and listens to messages.
"""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import hiredis
import msgspec
from redis import exceptions
from redis.asyncio import ConnectionPool

from limitforge import lua
from limitforge.errors import InvalidInput, StoreCorrupt, StoreError, StoreUnavailable
from limitforge.stores.redis.codec import FULL_REASON, ScriptCall, UnreplicatedReply, with_encoded_strings
from limitforge.stores.resilience.failure import NotServerFault, StoreFull

_HINT = "A password with characters such as / # @ must be percent-encoded."

UNAVAILABLE_ERRORS = {
    "LOADING": "it is still loading its data",
    "READONLY": "it is a replica now, and only its master can count",
    "OOM": FULL_REASON,
    "MASTERDOWN": "it is a replica whose master is gone",
    "NOAUTH": "it wants a password: put user and password into the URL",
    "ERR Protocol error: unauthenticated": "it wants a password: put user and password into the URL",
    "WRONGPASS": "it refused user and password of the URL",
    "NOPERM": "the user of the URL may not do this: see docs/operations.md for its ACL",
    "ERR The user executing the script": "the user of the URL may not do this: see docs/operations.md for its ACL",
    "BUSY": "it is busy with somebody's long script",
    "CLUSTERDOWN": "its cluster is down",
    "NOREPLICAS": "too few replicas are in sync (min-replicas-to-write)",
    "MISCONF": "it can't save its data and was told to stop writing then",
    "UNKILLABLE": "it is busy with somebody's long script",
    "ERR Script killed": "somebody killed the script (SCRIPT KILL)",
    "ERR max number of clients reached": "it takes no more clients (maxclients)",
}
"""What Redis says when it can't serve now; anything else that it refuses is a bug, or a value that is not ours."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a URL leads, and what is said there first. Its text tells no password."""

    host: str
    port: int
    path: str | None
    tls: ssl.SSLContext | None
    handshake: bytes
    handshake_replies: int
    """How many answers the greeting gets, the last one to loading the script."""
    redis_py_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The same for redis-py."""
    wait_replicas: int = 0
    """How many replicas must have a write before it counts."""
    wait_command: bytes = b""
    """What is said behind each call, if any must."""
    is_cluster: bool = False
    """Whether a server that is the wrong one says which is the right one."""

    def with_wait(self, replicas: int, ms: float) -> "Address":
        """The same server, whose answers count once that many replicas have what was written."""
        return replace(
            self,
            wait_replicas=replicas,
            wait_command=encode_command("WAIT", replicas, max(int(0.8 * ms), 1)) if replicas else b"",
        )

    def at(self, host: str, port: int) -> "Address":
        """Another server that is spoken to in the same way."""
        return replace(
            self, host=host, port=port, redis_py_options={**self.redis_py_options, "host": host, "port": port}
        )

    def with_login_only(self) -> "Address":
        """The same server, where nothing is said first but user and password."""
        return self._with_handshake(_login_commands(self.redis_py_options))

    def for_cluster(self) -> "Address":
        """The same server, which is also told the script for several slots."""
        told = self._with_handshake(
            [*_handshake_commands(self.redis_py_options), ("SCRIPT", "LOAD", lua.cross_slot_script())]
        )
        return replace(told, is_cluster=True)

    def for_master(self) -> "Address":
        """The same server, which is asked whether it is a master."""
        return self._with_handshake(
            [
                *_handshake_commands(self.redis_py_options)[:-1],
                ("ROLE",),
                _handshake_commands(self.redis_py_options)[-1],
            ]
        )

    def _with_handshake(self, said: list[tuple[Any, ...]]) -> "Address":
        return replace(
            self, handshake=b"".join(encode_command(*command) for command in said), handshake_replies=len(said)
        )

    def __repr__(self) -> str:
        return f"unix://{self.path}" if self.path else f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Refuses a URL that can't be used, by name; nothing is opened yet."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdigit():
        raise InvalidInput("url", f"the database must be a number, as in redis://localhost:6379/0. {_HINT}")
    try:
        pool: Any = ConnectionPool.from_url(url)
        connection = pool.connection_class(**pool.connection_kwargs)
        tls = connection.ssl_context.get() if parts.scheme == "rediss" else None
    except (ValueError, TypeError, OSError, exceptions.RedisError):
        # Nothing of the URL is told: a wrong one may have a piece of its password anywhere.
        raise InvalidInput("url", f"is not one that redis-py can use: see host, port, options. {_HINT}") from None
    told = pool.connection_kwargs
    greeting = _handshake_commands(told)
    return Address(
        host=told.get("host", "localhost"),
        port=told.get("port", 6379),
        path=told.get("path"),
        tls=tls,
        handshake=b"".join(encode_command(*command) for command in greeting),
        handshake_replies=len(greeting),
        redis_py_options=told,
    )


def _login_commands(told: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    if not told.get("password") and not told.get("username"):
        return []
    user = (told["username"],) if told.get("username") else ()
    return [("AUTH", *user, told.get("password") or "")]


def _handshake_commands(told: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    said = _login_commands(told)
    if told.get("db"):
        said.append(("SELECT", int(told["db"])))
    if told.get("client_name"):
        said.append(("CLIENT", "SETNAME", told["client_name"]))
    return [*said, ("SCRIPT", "LOAD", lua.script())]


ASKING = b"*1\r\n$6\r\nASKING\r\n"


def encode_command(*command: str | int | bytes) -> bytes:
    written: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows tuples of one only
    return written


def encode_call(call: ScriptCall) -> bytes:
    return _encode(("EVALSHA", lua.cross_slot_sha() if call.keys_per_slot else lua.sha()), call)


def encode_call_with_script(call: ScriptCall) -> bytes:
    """For a Redis that has forgotten the script."""
    return _encode(("EVAL", lua.cross_slot_script() if call.keys_per_slot else lua.script()), call)


def _encode(command: tuple[str, str | bytes], call: ScriptCall) -> bytes:
    try:
        if call.keys_per_slot:
            return encode_command(*command, 0, *call.args, *call.keys, msgspec.msgpack.encode(call.keys_per_slot))
        return encode_command(*command, len(call.keys), *call.keys, *call.args)
    except UnicodeEncodeError:
        return _encode(command, with_encoded_strings(call))


def is_script_missing(reply: object) -> bool:
    """Whether Redis does not know the script: then nothing was executed, and asking once more is no retry."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def is_no_longer_master(reply: object) -> bool:
    """Whether this connection leads to a master that is none any more: a new one may find the right one."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("READONLY", "MASTERDOWN"))


def is_replica(reply: object) -> bool:
    """Whether the answer to ROLE is that of a replica, which decides nothing: what it knows may be old."""
    return isinstance(reply, list) and bool(reply) and reply[0] == b"slave"


class Redirected(NotServerFault):
    """This node of a Cluster did nothing, and says who would: from now on, or (`once`) for this call only."""

    def __init__(self, slot: int, host: str, port: int, *, once: bool) -> None:
        place = "moving" if once else "elsewhere"
        super().__init__(f"slot {slot} of the Cluster is {place}; a Cluster needs redis+cluster:// in its URL")
        self.slot = slot
        self.host = host
        self.port = port
        self.is_ask = once


class SlotsNotTogether(NotServerFault):
    """A call over several slots was not executed: one of them is not here, or not wholly."""


class SlotMigrating(NotServerFault):
    """This node of a Cluster did nothing: the keys of the call are on their way from one node to another."""


_REDIRECTION = re.compile(r"(MOVED|ASK) (\d+) (.*):(\d+)$")


def translate_error(error: hiredis.ReplyError) -> StoreError:
    """The one place where what Redis refuses becomes `StoreUnavailable` or `StoreCorrupt`."""
    said = str(error)
    redirection = _REDIRECTION.match(said)
    if redirection is not None:
        word, slot, host, port = redirection.groups()
        return Redirected(int(slot), host, int(port), once=word == "ASK")
    if said.startswith("ERR Script attempted"):
        return SlotsNotTogether("a slot of the Cluster is not where it was")
    if said.startswith("TRYAGAIN"):
        return SlotMigrating("a slot of the Cluster is moving, and its keys are not together (TRYAGAIN)")
    for start, meaning in UNAVAILABLE_ERRORS.items():
        if said.startswith(start):
            kind = StoreFull if start == "OOM" else StoreUnavailable
            return kind(f"Redis can't serve now: {meaning} ({start})")
    return StoreCorrupt(f"Redis refused the script: {said}")


def require_replicas(reply: Any, replicas: object, wanted: int) -> Any:
    """The reply to a call behind which replicas were waited for."""
    is_enough = isinstance(replicas, int) and replicas >= wanted
    return (
        reply
        if is_enough or isinstance(reply, StoreError | hiredis.ReplyError)
        else UnreplicatedReply(reply, replicas, wanted)
    )


def should_split_by_slot(error: StoreError) -> bool:
    """Whether a call over several slots was refused before it began, which one for each slot might not be."""
    words = ("OOM", "READONLY", "MISCONF", "NOREPLICAS")
    return isinstance(error, SlotsNotTogether) or any(f"({word})" in str(error) for word in words)


def connection_error(error: BaseException, *, maybe_counted: bool = False) -> StoreUnavailable:
    """The same for what the network says."""
    said = str(error) or type(error).__name__
    return StoreUnavailable(f"Redis did not answer: {said}", maybe_counted=maybe_counted)


def handshake_error(replies: Sequence[object]) -> StoreError | None:
    """What Redis had against the greeting, if anything. Whatever it is: it can't serve us now."""
    for reply in replies:
        if is_replica(reply):
            return StoreUnavailable("this Redis is a replica, and only its master can count")
        if isinstance(reply, hiredis.ReplyError):
            error = translate_error(reply)
            return error if isinstance(error, StoreUnavailable) else StoreUnavailable(f"Redis refused us: {reply}")
    return None
