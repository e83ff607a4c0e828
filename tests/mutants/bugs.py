"""Read the list of deliberate bugs: one per line in bugs.toml."""

import tomllib
from pathlib import Path

import msgspec

PACKAGE = Path("src/limitforge")


class Bug(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wrong change of one file that tests must detect."""

    file: str
    """Relative to src/limitforge."""
    old: str
    """Text that occurs exactly once in that file."""
    new: str
    tests: str
    """Arguments for pytest: quick tests that fail with this bug."""
    equivalent: str = ""
    """The reason why no test can detect it. Such a bug is listed, but not tried."""

    def __str__(self) -> str:
        return f"{self.file}: {_one_line(self.old)} -> {_one_line(self.new)}"

    def apply_to(self, source: str) -> str:
        """Return the source with this bug. Raises ValueError if the text to replace is not unique."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"the text to replace occurs {found} times, not once")
        if self.old == self.new:
            raise ValueError("this replaces the text by itself")
        return source.replace(self.old, self.new)

    def write_into(self, root: Path) -> None:
        path = root / PACKAGE / self.file
        if not path.is_file():
            raise ValueError("there is no such file")
        path.write_text(self.apply_to(path.read_text()))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # Python reuses it if both sources have the same size and second


def read_bugs(path: Path) -> list[Bug]:
    return msgspec.convert(tomllib.loads(path.read_text())["bugs"], list[Bug])


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line if len(line) <= 60 else line[:57] + '...'}`"
