"""The `limitforge` command, one file per command group."""

import sys


def main() -> None:
    """The console entry. Typer and Rich are an extra: without them it says how to get them."""
    try:
        from limitforge.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("limitforge", "msgspec"):
            raise
        print("The limitforge command needs a few more packages: pip install 'limitforge[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    run()
