"""Read the file that a command names, or the standard input."""

import sys
from pathlib import Path

from limitforge.errors import InvalidInput


def read_file(file: str, max_bytes: int) -> bytes:
    """Return the content of a file, or of the standard input for `-`.

    Reads one byte more than `max_bytes`, so that the caller notices a larger file. Raises `InvalidInput` with the name
    of the file if it can't be read.
    """
    try:
        if file == "-":
            return sys.stdin.buffer.read(max_bytes + 1)
        with Path(file).open("rb") as opened:
            return opened.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # open() raises ValueError for a name with a null character
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(file, f"can't be read: {reason or error}") from None
