"""A running service, for the paths of healthchecks and probes."""

from collections.abc import Iterator

import pytest

from tests.service.live_service import LiveService


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with LiveService(f"sqlite:///{tmp_path_factory.mktemp('deploy')}/deploy.db") as live:
        yield live
