"""The log tells an operator what happened, and not a line for each check."""

import pytest

from limitforge import FixedWindow
from tests.chaos.conftest import Open
from tests.chaos.waiting import eventually, until_it_works
from tests.proxy import Proxy, Refuse

LOGINS = FixedWindow(name="logins", limit=10**9, window_seconds=86_400)
CALLS = 500


@pytest.mark.parametrize("breaker_failures", [3, 1_000_000], ids=["breaker", "no-breaker"])
def test_an_outage_is_a_few_lines_not_one_a_check(
    opened: Open, proxy: Proxy, caplog: pytest.LogCaptureFixture, breaker_failures: int
) -> None:
    limiter = opened(proxy.url, failure="open", breaker_failures=breaker_failures, breaker_seconds=0.1)
    limiter.check("r", "s", limits=LOGINS)
    with proxy.doing(Refuse()):
        for _ in range(CALLS):
            limiter.check("r", "s", limits=LOGINS)
    until_it_works(limiter)
    lines = [record for record in caplog.records if record.name.split(".")[0] == "limitforge"]
    assert 1 <= len(lines) <= 30
    assert {record.levelname for record in lines} <= {"INFO", "WARNING", "ERROR"}


def test_what_was_admitted_is_told_by_limit_when_the_store_is_back(
    opened: Open, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = opened(proxy.url, failure="open", breaker_seconds=0.05)
    limiter.check("r", "s", limits=LOGINS)
    with proxy.doing(Refuse()):
        for _ in range(7):
            limiter.check("r", "s", limits=LOGINS, cost=11)
    until_it_works(limiter)
    eventually(lambda: any("logins" in line and "77" in line for line in caplog.messages))


def test_subjects_are_not_in_the_log(opened: Open, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    limiter = opened(proxy.url, failure="local", breaker_seconds=0.05)
    with proxy.doing(Refuse()):
        for _ in range(5):
            limiter.check("r", "user:somebody@example.org", limits=LOGINS)
    until_it_works(limiter)
    assert caplog.messages
    assert "somebody" not in caplog.text
