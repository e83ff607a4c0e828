"""The ACL rights in docs/operations.md are enough for every feature, and each of them is needed."""

import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
import redis as redis_py

from limitforge import StoreOptions, StoreUnavailable, SyncLimiter
from tests.contract.test_redis import EVERY
from tests.servers import RedisServer

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
RIGHTS = (re.search(r"ACL SETUSER limitforge on >password (.*?)```", DOCS.read_text(), re.DOTALL) or [""])[1].split()
OPTIONS = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=60_000, breaker_failures=10**6)

# Only redis-py clients and databases other than 0 need these.
SPARE = {"+ping", "+client|setname", "+select", "+hello", "+unsubscribe"}


def everything(limiter: SyncLimiter) -> None:
    """Run every command of the limiter once, with each kind of limit."""
    decision = limiter.check("r", "s", limits=EVERY)
    assert limiter.renew(decision.lease_id or "")
    limiter.release(decision.lease_id or "")
    limiter.settle(limiter.reserve("r", "s", limits=EVERY, cost=2).reservation_id or "", 1)
    for subject in ("s", "other"):
        limiter.set_override("r", subject, {"f": {"limit": 1}}, limits=EVERY[2], ttl_seconds=60)
        limiter.set_override("*", subject, {"f": {"limit": 2}}, limits=EVERY[2], ttl_seconds=30)
    assert len(limiter.list_overrides().overrides) == 4
    assert limiter.missing_overrides([("default", "r", "s"), ("default", "r", "unknown")]) == [1]
    assert limiter.delete_override("r", "s")
    assert limiter.get_override("*", "s")
    assert limiter.clear_overrides() == 2
    assert not limiter.check("r", "s", limits=EVERY[2], cost=11).allowed
    limiter.reset("r", "s", limits=EVERY)
    limiter.drop_denials()
    store = cast("Any", limiter._store)
    assert store._run_flow(store._core.heartbeat_flow(), time.monotonic() + 30) == 1
    store._run_flow(store._core.heartbeat_flow(0), time.monotonic() + 30)


def connected(server: RedisServer, rights: list[str]) -> SyncLimiter:
    raw: Any = redis_py.Redis.from_url(server.url)
    raw.execute_command("ACL", "SETUSER", "limitforge", "reset", "on", ">password", *rights)
    raw.flushall()
    raw.script_flush()
    raw.close()
    url = server.url.replace("redis://", "redis://limitforge:password@")
    return SyncLimiter.connect(url, options=OPTIONS)


def test_the_documented_rights_are_enough(own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with connected(own_redis_server, RIGHTS) as limiter:
        everything(limiter)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


def test_each_documented_right_is_needed(own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    for right in [right for right in RIGHTS if right.startswith("+") and right not in SPARE]:
        caplog.clear()
        with connected(own_redis_server, [kept for kept in RIGHTS if kept != right]) as limiter:
            try:
                everything(limiter)
                limiter.check("r", "s", limits=EVERY[2], cost=11)
                limiter.check("r", "s", limits=EVERY[2], cost=11)  # starts to listen
                own_redis_server.command("SCRIPT FLUSH")
                limiter.check("r", "t", limits=EVERY)
            except StoreUnavailable as refused:
                assert "ACL" in str(refused) or "NOPERM" in str(refused), right  # noqa: PT017
            else:
                assert right in ("+publish", "+subscribe"), right
