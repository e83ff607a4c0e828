"""Hold source, documentation and README to plain English: a short list of phrases must not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN = (
    r"\w*(?:who|what|which)ever",
    r"nobody|somebody",
    r"whom",
    r"shall",
    r"such that",
    r"told",
    r"(?<!there\s)is no(?! (?:longer|more|less|later|earlier)\b)",
    r"makes? no sense",
    r"there is no such",
    r"in place of",
    r"for as long as",
    r"none of ours",
    r"however often",
    r"stands above",
    r"goes on",
    r"hears? of|heard of",
    r"looked at",
    r"left alone",
    r"gives? way",
    r"door (?:one|two)",
)
"""Matched as whole words, in any case, also across a line break (`GAP` then skips the marker of a comment)."""

GAP = r"\s++(?:(?:#|--|\*|>)\s*+)?+"
PHRASES = re.compile(rf"\b(?:{'|'.join(FORBIDDEN)})(?!\w)".replace(" ", GAP), re.IGNORECASE)
SUFFIXES = {".py", ".lua", ".md", ".mako"}


def texts() -> list[Path]:
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("src", "docs", "deploy"):
        files += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return files


def offences(path: Path) -> list[str]:
    """Return `file:line: phrase` for each forbidden phrase."""
    text = path.read_text()
    name = path.relative_to(ROOT)
    return [f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}" for found in PHRASES.finditer(text)]


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_text_has_no_forbidden_phrase(path: Path) -> None:
    assert offences(path) == []


def test_a_phrase_is_found_across_lines_and_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(
        "# It is no\n    # longer here.\n# Whoever reads this is\n# no reader.\n# Nothing else: unwhomable.\n"
    )
    assert offences(file) == ["module.py:3: 'Whoever'", "module.py:3: 'is\\n# no'"]
