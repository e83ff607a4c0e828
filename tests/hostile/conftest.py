"""One service for the attacks of a file: memory that one attack leaves behind would show in the next."""

from collections.abc import Iterator

import pytest

from tests.hostile.attack import Victim, victim


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("hostile")) as found:
        yield found
