"""Connections of redis-py to a server of a store, for what is not hot: listening, and what nodes share."""

import asyncio
import ssl
from typing import Any, cast

import redis.asyncio
from redis.asyncio.connection import Connection

from limitforge.stores.redis.resp import Address


class TlsConnection(Connection):
    """TLS by a context that is there already: redis-py builds one for each connection, which takes 30 ms on the event
    loop. When it is cancelled or closed, its socket is closed at once.
    """

    def __init__(self, tls: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if not name.startswith("ssl_")})
        self._tls = tls

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]
        writer = cast("asyncio.StreamWriter", self._writer)
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await writer.start_tls(self._tls, server_hostname=self.host)
        except BaseException:
            self._abort()
            raise

    async def disconnect(self, *given: Any, **named: Any) -> None:
        self._abort()  # a closing that the server does not answer would be waited for
        await super().disconnect(*given, **named)

    def _abort(self) -> None:
        """Close at once, so that redis-py knows that it must connect again."""
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.transport.abort()


def create_pool(client: Any, address: Address, *, blocking: bool = False, **options: Any) -> Any:
    """A pool of `redis` or `redis.asyncio`. These options count more than those of the URL."""
    pool = client.BlockingConnectionPool if blocking else client.ConnectionPool
    return pool(**{**address.redis_py_options, **_connection_options(client, address), **options})


def _connection_options(client: Any, address: Address) -> dict[str, Any]:
    """The class of a connection, and what only that class is given."""
    kinds = client.connection
    if address.tls is None:
        return {"connection_class": kinds.Connection if address.path is None else kinds.UnixDomainSocketConnection}
    if client is redis.asyncio:
        return {"connection_class": TlsConnection, "tls": address.tls}
    return {"connection_class": kinds.SSLConnection}
