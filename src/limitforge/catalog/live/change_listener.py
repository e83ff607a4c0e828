"""Listen for notifications that a change was made, and subscribe again when the connection is lost."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from limitforge.errors import LimitforgeError
from limitforge.observability.events import log_event

MIN_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class ChangeListener:
    """One subscription: to a channel in Redis, or to notifications of Postgres."""

    def __init__(
        self,
        name: str,
        subscribe: Callable[[], AsyncGenerator[None, None]],
        *,
        on_subscribed: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        """`subscribe` handles the messages itself. It yields once it is subscribed, and may yield again later."""
        self.name = name
        self.is_active = False
        self._subscribe = subscribe
        self._on_subscribed = on_subscribed
        self._on_ended = on_ended

    async def run(self) -> None:
        """Listen until cancelled."""
        pause = MIN_PAUSE_SECONDS
        while True:
            try:
                async with contextlib.aclosing(self._subscribe()) as activity:
                    async for _ in activity:
                        if not self.is_active:
                            self.is_active = True
                            pause = MIN_PAUSE_SECONDS
                            self._on_subscribed()
            except LimitforgeError as error:
                if pause == MIN_PAUSE_SECONDS:
                    log_event(
                        _log,
                        logging.WARNING,
                        "catalog.listener_failed",
                        "could not listen for changes, polling the database until the next attempt",
                        listener=self.name,
                        error=error,
                    )
            except Exception:  # noqa: BLE001 - an unexpected error must not end listening for good
                log_event(
                    _log,
                    logging.ERROR,
                    "catalog.listener_failed",
                    "could not listen for changes, polling the database until the next attempt",
                    exc_info=True,
                    listener=self.name,
                )
            self.is_active = False
            self._on_ended()
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
