"""Connection pools of redis-py for what is not on the hot path: subscriptions and the catalog."""

import asyncio
import ssl
from typing import Any, cast

import redis.asyncio
from redis.asyncio.connection import Connection

from limitforge.stores.redis.address import Address


class TlsConnection(Connection):
    """A TLS connection with a shared context. redis-py creates a context for each connection, which blocks the event
    loop for 30 ms. When this connection is cancelled or closed, its socket is closed at once.
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
        self._abort()  # closing TLS would wait for the server
        await super().disconnect(*given, **named)

    def _abort(self) -> None:
        """Close the socket at once, and let redis-py know that it must connect again."""
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.transport.abort()


def create_pool(client: Any, address: Address, *, blocking: bool = False, **options: Any) -> Any:
    """Create a pool of `redis` or `redis.asyncio`. `options` take precedence over those of the URL."""
    pool = client.BlockingConnectionPool if blocking else client.ConnectionPool
    return pool(**{**address.redis_py_options, **_connection_options(client, address), **options})


def _connection_options(client: Any, address: Address) -> dict[str, Any]:
    """Return the connection class, and the options that only that class has."""
    kinds = client.connection
    if address.tls is None:
        return {"connection_class": kinds.Connection if address.path is None else kinds.UnixDomainSocketConnection}
    if client is redis.asyncio:
        return {"connection_class": TlsConnection, "tls": address.tls}
    return {"connection_class": kinds.SSLConnection}
