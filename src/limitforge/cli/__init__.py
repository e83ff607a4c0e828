"""The `limitforge` command: a module or package for each command or group.

`catalog/` is shared by the commands of the catalog, and `terminal/` by all commands.
"""

import sys


def main() -> None:
    """Run the `limitforge` command. Without the extra `cli`, print how to install it."""
    try:
        from limitforge.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("limitforge", "msgspec"):
            raise
        print("The limitforge command needs more packages: pip install 'limitforge[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    run()
