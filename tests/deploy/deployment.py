"""The deployment files, and how tests read them.

Docker, Kubernetes and systemd can't run here, so tests parse and lint their files and compare them with the program.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
SYSTEMD = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "kubernetes"
BIN = Path(sys.executable).parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = f"limitforge:{PROJECT['version']}"
SPARE_SECONDS = 2.0  # the supervisor adds this to LIMITFORGE_SHUTDOWN_SECONDS
VERSIONED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
Fields = dict[str, Any]


def run(*command: str | Path, folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found, text
    return float(found[1])


PEPPERS = "1:a pepper that the tests alone know"


def env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def dockerfile() -> str:
    return (COMPOSE / "Dockerfile").read_text()


def image_user() -> int:
    """Return the numeric id of the user in the image."""
    (user,) = re.findall(r"(?m)^USER (\d+):\d+$", dockerfile())
    return int(user)


def deployment_files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "deploy"]
    named = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in named if (ROOT / name).is_file()]
