"""Commands that run beside the batches of checks: how many may run at once on one connection."""

import asyncio

import pytest

from limitforge import Limiter, StoreUnavailable
from limitforge.stores.errors import NotServerFault
from limitforge.stores.redis.aio import event_loop
from limitforge.stores.redis.aio.reconnecting import MAX_COMMANDS
from tests.contract.conftest import PATIENT

LIMIT = "100/minute"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a second for a thousand commands."""
    monkeypatch.setattr(event_loop, "COMMAND_TIMEOUT_SECONDS", 40.0)


async def outcomes(limiter: Limiter, commands: int) -> list[object]:
    """Start all in one iteration of the loop: none is answered before the last was started."""
    resets = (limiter.reset("r", f"subject {index}", limits=LIMIT) for index in range(commands))
    return await asyncio.gather(*resets, return_exceptions=True)


async def test_a_thousand_commands_may_run_and_not_one_more(redis_url: str) -> None:
    limiter = Limiter.connect(redis_url, options=PATIENT)
    try:
        for _ in range(2):  # commands that ended or were refused make room for others
            answers = await outcomes(limiter, MAX_COMMANDS + 3)
            assert answers[:MAX_COMMANDS] == [None] * MAX_COMMANDS
            assert [type(answer) for answer in answers[MAX_COMMANDS:]] == [NotServerFault] * 3
            assert f"{MAX_COMMANDS} commands are running already" in str(answers[-1])
        assert limiter.status().breaker == "closed"  # the limiter refused them: Redis did not fail
    finally:
        await limiter.close()


async def test_checks_are_decided_while_a_thousand_commands_run(redis_url: str) -> None:
    limiter = Limiter.connect(redis_url, options=PATIENT)
    try:
        commands = asyncio.gather(*(limiter.reset("r", f"{at}", limits=LIMIT) for at in range(MAX_COMMANDS)))
        decision = await limiter.check("r", "s", limits=LIMIT)
        assert (decision.allowed, decision.degraded) == (True, None)
        await commands
    finally:
        await limiter.close()


async def test_commands_that_failed_make_room_for_others() -> None:
    limiter = Limiter.connect("redis://127.0.0.1:1", options=PATIENT)
    try:
        for _ in range(2):
            answers = await outcomes(limiter, MAX_COMMANDS)
            assert {type(answer) for answer in answers} <= {StoreUnavailable, NotServerFault}
            assert not any("running already" in str(answer) for answer in answers)
        with pytest.raises(StoreUnavailable):
            await limiter.reset("r", "s", limits=LIMIT)
    finally:
        await limiter.close()
