"""One service for all attacks of a file, so that memory which one attack leaves behind shows in the next."""

import resource
from collections.abc import Iterator

import pytest

from tests.hostile.attack import AttackTarget, attack_target

FILES = 8_192  # open files that the attacks need for their connections


@pytest.fixture(scope="session", autouse=True)
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard), hard)
        )
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackTarget]:
    with attack_target(tmp_path_factory.mktemp("hostile")) as found:
        yield found
