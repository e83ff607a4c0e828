"""Log lines with a fixed event name and fields, so that operators can search for them and alert on them."""

import json
import logging
import re

_PLAIN = re.compile(r"[^\s\"=\x00-\x1f\x7f]+")


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    message: str,
    *,
    exc_info: BaseException | bool | None = None,
    **fields: object,
) -> None:
    """Log `event: message key=value ...`.

    `event` is `area.name` and stays the same from release to release. `message` is a constant sentence: values go into
    `fields`. The log record carries both as `event` and `fields`, so that a handler can write JSON.
    """
    if logger.isEnabledFor(level):
        rendered = "".join(f" {name}={_rendered(value)}" for name, value in fields.items())
        # The event is part of the format string, so that a filter can tell events apart by `record.msg`.
        logger.log(
            level,
            f"{event}: {message}%s",  # noqa: G004
            rendered,
            exc_info=exc_info,
            stacklevel=2,
            extra={"event": event, "fields": fields},
        )


def _rendered(value: object) -> str:
    """Quote what has spaces, quotes or control characters, so that a value can't forge a field or a line."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
