"""Repeat a task of a worker, and log the start of an outage only."""

import asyncio
from collections.abc import Awaitable, Callable


async def repeat(
    work: Callable[[], Awaitable[object]],
    seconds: float,
    errors: tuple[type[Exception], ...],
    log_failure: Callable[[Exception], None],
) -> None:
    """Wait and call `work`, again and again. Of consecutive failures with these errors, only the first is logged."""
    is_failing = False
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except errors as error:
            if not is_failing:
                log_failure(error)
            is_failing = True
        else:
            is_failing = False
