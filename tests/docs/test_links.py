"""Every link, anchor and path in the documentation leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
PATHS = re.compile(r"`((?:tests|docs|deploy|scripts|stores|service|core|catalog|lua|cli)/[\w./-]*\w/?)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for path in PATHS.findall(text):
        assert (ROOT / path).exists() or (ROOT / "src" / "limitforge" / path).exists(), path
