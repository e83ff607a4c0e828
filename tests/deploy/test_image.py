"""Compare the Dockerfile with the project."""

import re

from tests.deploy.deployment import COMPOSE, PROJECT, ROOT, dockerfile, image_user


def test_the_image_installs_extras_that_exist_under_the_constraints() -> None:
    (line,) = re.findall(r"(?m)^RUN \S+pip install .*$", dockerfile())
    (extras,) = re.findall(r"\.\[([\w,]+)\]", line)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "service" in extras
    assert "-c constraints.txt" in line


def test_the_image_copies_what_the_build_needs_and_nothing_secret() -> None:
    copied = [name for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", dockerfile()) for name in line.split()[:-1]]
    seen = re.findall(r"(?m)^!(\S+)$", (COMPOSE / "Dockerfile.dockerignore").read_text())
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(seen)
    assert {"src", "pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]} == set(copied)


def test_the_image_does_not_run_as_root_and_runs_the_program() -> None:
    assert f"--uid {image_user()} " in dockerfile()
    assert image_user() > 0
    assert 'ENTRYPOINT ["limitforge"]' in dockerfile()
    assert "limitforge" in PROJECT["scripts"]
    stages = re.findall(r"(?m)^FROM (\S+)", dockerfile())
    assert len(set(stages)) == 1  # a virtual environment only works with the same interpreter path
    assert stages[0].startswith("python:3.")
