"""The address of a Redis server, and the handshake that a new connection to it starts with."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool

from limitforge import lua
from limitforge.errors import InvalidInput
from limitforge.stores.redis.resp import encode_command

_HINT = "A password with characters such as / # @ must be percent-encoded."

_Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and what to send first. `repr` contains no password."""

    host: str
    port: int
    path: str | None
    tls: ssl.SSLContext | None
    handshake: bytes
    """Commands that a new connection sends first. The last one loads the script."""
    handshake_replies: int
    redis_py_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The same connection as options of redis-py."""
    wait_replicas: int = 0
    """How many replicas must acknowledge a write before its reply counts."""
    wait_command: bytes = b""
    """WAIT, which follows each call if replicas must acknowledge it."""
    is_cluster: bool = False
    """True if the server redirects calls for slots that it does not own."""

    @property
    def name(self) -> str:
        """The host and port, or the path of the unix socket."""
        return self.path or f"{self.host}:{self.port}"

    def with_wait(self, replicas: int, ms: float) -> "Address":
        """Return the same server with a WAIT for that many replicas after each call."""
        command = encode_command("WAIT", replicas, max(int(0.8 * ms), 1)) if replicas else b""
        return replace(self, wait_replicas=replicas, wait_command=command)

    def at(self, host: str, port: int) -> "Address":
        """Return another server with the same handshake and options."""
        options = {**self.redis_py_options, "host": host, "port": port}
        return replace(self, host=host, port=port, redis_py_options=options)

    def with_login_only(self) -> "Address":
        """Return the same server with a handshake that only logs in."""
        return self._with_handshake(_login_commands(self.redis_py_options))

    def for_cluster(self) -> "Address":
        """Return the same server with a handshake that loads the script for multi-slot calls, too."""
        commands = [*_handshake_commands(self.redis_py_options), ("SCRIPT", "LOAD", lua.multi_slot_script())]
        return replace(self._with_handshake(commands), is_cluster=True)

    def for_master(self) -> "Address":
        """Return the same server with a handshake that fails if it is a replica."""
        *commands, load_script = _handshake_commands(self.redis_py_options)
        return self._with_handshake([*commands, ("ROLE",), load_script])

    def _with_handshake(self, commands: Sequence[_Command]) -> "Address":
        return replace(self, handshake=_encode_all(commands), handshake_replies=len(commands))

    def __repr__(self) -> str:
        return f"unix://{self.path}" if self.path else f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Return the address that a URL of one server describes, without connecting to it. Raises InvalidInput."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdigit():
        raise InvalidInput("url", f"the database must be a number, as in redis://localhost:6379/0. {_HINT}")
    try:
        pool: Any = ConnectionPool.from_url(url)
        connection = pool.connection_class(**pool.connection_kwargs)
        tls = connection.ssl_context.get() if parts.scheme == "rediss" else None
    except (ValueError, TypeError, OSError, exceptions.RedisError):
        # The message contains no part of the URL: in an invalid URL, any part may belong to the password.
        raise InvalidInput("url", f"is not a valid Redis URL: check host, port and options. {_HINT}") from None
    options = pool.connection_kwargs
    commands = _handshake_commands(options)
    return Address(
        host=options.get("host", "localhost"),
        port=options.get("port", 6379),
        path=options.get("path"),
        tls=tls,
        handshake=_encode_all(commands),
        handshake_replies=len(commands),
        redis_py_options=options,
    )


def _login_commands(options: Mapping[str, Any]) -> list[_Command]:
    if not options.get("password") and not options.get("username"):
        return []
    user = (options["username"],) if options.get("username") else ()
    return [("AUTH", *user, options.get("password") or "")]


def _handshake_commands(options: Mapping[str, Any]) -> list[_Command]:
    commands = _login_commands(options)
    if options.get("db"):
        commands.append(("SELECT", int(options["db"])))
    if options.get("client_name"):
        commands.append(("CLIENT", "SETNAME", options["client_name"]))
    return [*commands, ("SCRIPT", "LOAD", lua.script())]


def _encode_all(commands: Sequence[_Command]) -> bytes:
    return b"".join(encode_command(*command) for command in commands)
