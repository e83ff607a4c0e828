"""The log shows an operator what happened, without a line for each check."""

import pytest

from limitforge import FixedWindow
from tests.chaos.conftest import Connect
from tests.chaos.waiting import eventually, wait_until_store_decides
from tests.proxy import CloseConnections, Proxy

LOGINS = FixedWindow(name="logins", limit=10**9, window_seconds=86_400)
CALLS = 500


@pytest.mark.parametrize("breaker_failures", [3, 1_000_000], ids=["breaker", "no-breaker"])
def test_an_outage_is_a_few_lines_not_one_a_check(
    opened: Connect, proxy: Proxy, caplog: pytest.LogCaptureFixture, breaker_failures: int
) -> None:
    limiter = opened(proxy.url, failure="open", breaker_failures=breaker_failures, breaker_seconds=0.1)
    limiter.check("r", "s", limits=LOGINS)
    with proxy.in_mode(CloseConnections()):
        for _ in range(CALLS):
            limiter.check("r", "s", limits=LOGINS)
    wait_until_store_decides(limiter)
    lines = [record for record in caplog.records if record.name.split(".")[0] == "limitforge"]
    assert 1 <= len(lines) <= 30
    assert {record.levelname for record in lines} <= {"INFO", "WARNING", "ERROR"}


def test_admissions_are_logged_by_limit_when_the_store_is_back(
    opened: Connect, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = opened(proxy.url, failure="open", breaker_seconds=0.05)
    limiter.check("r", "s", limits=LOGINS)
    with proxy.in_mode(CloseConnections()):
        for _ in range(7):
            limiter.check("r", "s", limits=LOGINS, cost=11)
    wait_until_store_decides(limiter)
    eventually(lambda: any("logins" in line and "77" in line for line in caplog.messages))


def test_subjects_are_not_in_the_log(opened: Connect, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    limiter = opened(proxy.url, failure="local", breaker_seconds=0.05)
    with proxy.in_mode(CloseConnections()):
        for _ in range(5):
            limiter.check("r", "user:somebody@example.org", limits=LOGINS)
    wait_until_store_decides(limiter)
    assert caplog.messages
    assert "somebody" not in caplog.text
