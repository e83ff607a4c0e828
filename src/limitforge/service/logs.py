"""What the service logs, and where: on stderr, a line each. Keys, tokens and subjects are in none of them."""

import logging
import sys

from limitforge.service.settings import Settings


def set_up_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    for name in ("aiosqlite", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(name).setLevel("WARNING")  # what they say at other levels holds parameters, or nothing new
