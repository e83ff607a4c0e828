"""Write docs/reference/settings.md from the code. `make generate` runs it, and a test compares both.

python scripts/generate_reference.py
"""

from dataclasses import fields
from pathlib import Path

from limitforge.service.settings import ENV_PREFIX, Settings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
TEXT = """\
# Settings

Every setting of `limitforge serve`. Set the environment variable, or use the name in lower case without the prefix in a
TOML file (`--settings FILE` or `LIMITFORGE_SETTINGS`). Command-line options take precedence over environment variables,
which take precedence over the file. `limitforge settings` prints the current values.

This page is generated from the code: run `make generate` after a change.

| variable | default | meaning |
|---|---|---|
"""


def settings_page() -> str:
    rows = [
        f"| `{ENV_PREFIX}{each.name.upper()}` | {_shown(each.default)} | {each.metadata['help']} |"
        for each in fields(Settings)
    ]
    return TEXT + "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    if default == "":
        return "not set"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(settings_page())
