"""The map in CONTRIBUTING names what exists, and leaves out no package."""

import re

import pytest

from tests.docs.code_blocks import ROOT

SOURCE = ROOT / "src" / "limitforge"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAP = PAGE[PAGE.index("## Map of the source") : PAGE.index("## Which tests to run")]
PATH = re.compile(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py|\.lua))`")

NAMED = sorted(
    {path for row in MAP.splitlines() if row.startswith("| `") and "*planned" not in row for path in PATH.findall(row)}
)
TESTS = sorted(set(re.findall(r"\btests/[a-z_/]*[a-z](?:\.py|\.json|\.toml)?", PAGE)))


@pytest.mark.parametrize("path", NAMED)
def test_the_map_names_existing_files(path: str) -> None:
    assert (SOURCE / path).exists()


@pytest.mark.parametrize("path", TESTS)
def test_named_test_folders_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_package_and_module_at_the_top_is_on_the_map() -> None:
    top = {path.name for path in SOURCE.iterdir() if not path.name.startswith("_") and path.name != "py.typed"}
    assert {path.partition("/")[0] for path in NAMED} == top
