"""Print the versions that `scripts/test-versions` installs, as constraints for pip.

    python scripts/pins.py lowest    each dependency at the lowest version that pyproject.toml allows
    python scripts/pins.py newest    no dependency: pip takes the newest that pyproject.toml allows

Packages that only the tests need keep the version of constraints.txt, because they are not under test.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?(>=(?P<floor>[\w.]+))?(,<[\w.]+)?")
TOOLS = ("test", "dev", "bench")


def pins(versions: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [*project["dependencies"], *(each for extra in extras if extra not in TOOLS for each in extras[extra])]
    floors = [_floor(each) for each in used if not each.startswith("limitforge[")]
    tools = {each.lower() for each in extras["test"]}
    exact = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in exact if line.partition("==")[0].lower().replace("_", "-") in tools]
    return [*(floors if versions == "lowest" else []), *kept]


def _floor(requirement: str) -> str:
    found = REQUIREMENT.fullmatch(requirement)
    if found is None or found["floor"] is None:
        sys.exit(f"pyproject.toml: {requirement!r} has no lowest version: write name>=version")
    return f"{found['name']}=={found['floor']}"


if __name__ == "__main__":
    print("\n".join(pins(sys.argv[1])))
