"""The hot path: a key and a body become an answer. Both doors call it, and nothing here knows HTTP's framing."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from limitforge.catalog.cache import Caller, Snapshots
from limitforge.catalog.model import KeyKind, KeyScope, refusal
from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import Decision
from limitforge.errors import InvalidInput, LimitforgeError, UnknownKey
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.answers import JSON, Answer, DecisionBody, body_of, decided, failed, refused
from limitforge.service.bodies import CheckBody, read, read_check
from limitforge.service.counters import Counters
from limitforge.service.credentials import Who
from limitforge.service.problems import problem_of
from limitforge.service.tickets import Tickets

MAX_BODY = 65_536
MAX_BATCH_BODY = 1_048_576
MAX_BATCH = 1_000

CHECK = KeyScope.CHECK
TEST = KeyKind.TEST

Tell = Callable[[Answer], None]
Work = Callable[[Caller, bytes, Tell], None]

_encode = msgspec.json.Encoder().encode


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /v1/check/batch` takes: each check is read by itself, so that a wrong one spoils no other."""

    checks: list[Any]


_batch_body = msgspec.json.Decoder(BatchBody).decode


class Checks:
    """Decides checks for whoever presents a key."""

    def __init__(
        self,
        limiter: Limiter,
        snapshots: Snapshots,
        tickets: Tickets,
        counters: Counters,
        denied: Callable[[str, str], None],
    ) -> None:
        """`denied` hears of each denial: whose, and of whom."""
        self._limiter = limiter
        self._denied = denied
        self._snapshots = snapshots
        self._seen = snapshots.seen
        self._tickets = tickets
        self._counters = counters
        self._cold: set[asyncio.Task[None]] = set()

    def submit(self, who: Who, body: bytes, tell: Tell) -> None:
        """`tell` is called once with the answer, perhaps before this returns."""
        self._work(self._check, who, body, tell)

    def submit_batch(self, who: Who, body: bytes, tell: Tell) -> None:
        self._work(self._batch, who, body, tell)

    async def caller(self, who: Who, scope: KeyScope) -> Caller:
        """Whoever presents this key, if it may do this."""
        if who.key is None:
            raise UnknownKey("send your key as `x-api-key`, or as `Authorization: Bearer`")
        caller = self._snapshots.seen(who.seen) or await self._snapshots.find(who.key, who.source)
        caller.require(scope)
        return caller

    def request(self, caller: Caller, body: CheckBody) -> tuple[Selection, Request]:
        """What the limiter is asked for; refused where a field makes no sense."""
        selection = self.select(caller, body)
        return selection, Request(
            resource=selection.template or body.resource,
            subject=body.subject,
            limits=selection.limits,
            cost=body.cost,
            costs=body.costs,
            tenant=caller.key.tenant_id,
            priority=priority_of(caller, selection, body.resource) if body.priority is None else body.priority,
            shadow=selection.shadow,
            failure=selection.failure,
        )

    @staticmethod
    def select(caller: Caller, body: CheckBody) -> Selection:
        if not body.resource or not body.subject:
            raise InvalidInput("subject" if body.resource else "resource", "must not be empty")
        return caller.tenant.snapshot.select(body.resource, caller.key.plan_id, body.plan_id)

    def answered(self, call: str, status: int) -> None:
        """Some door has answered."""
        self._counters.answered(call, status)

    # --- One check ---------------------------------------------------------------------------------------------------

    def _work(self, work: Work, who: Who, body: bytes, tell: Tell) -> None:
        """At once for a key that is known, else later."""
        caller = self._seen(who.seen)
        if caller is None:
            task = asyncio.get_running_loop().create_task(self._later(work, who, body, tell))
            self._cold.add(task)
            task.add_done_callback(self._cold.discard)
            return
        try:
            caller.require(CHECK)
            work(caller, body, tell)
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            tell(failed(error))

    async def _later(self, work: Work, who: Who, body: bytes, tell: Tell) -> None:
        """The first time that a key is seen."""
        try:
            caller = await self.caller(who, CHECK)
            work(caller, body, tell)
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            tell(failed(error))

    def _check(self, caller: Caller, body: bytes, tell: Tell) -> None:
        asked = read_check(body)
        selection = self.select(caller, asked)
        self._limiter.submit(
            partial(self._decided, caller, selection, asked.subject, tell),
            selection.template or asked.resource,
            asked.subject,
            selection.limits,
            asked.cost,
            asked.costs,
            caller.key.tenant_id,
            priority_of(caller, selection, asked.resource) if asked.priority is None else asked.priority,
            selection.shadow,
            selection.failure,
        )

    def _decided(
        self,
        caller: Caller,
        selection: Selection,
        subject: str,
        tell: Tell,
        decision: Decision | LimitforgeError,
    ) -> None:
        try:
            if isinstance(decision, Decision):
                answer = self.decided(caller, selection, subject, decision)
            else:
                answer = refused(decision)
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            answer = failed(error)
        tell(answer)

    def decided(self, caller: Caller, selection: Selection, subject: str, decision: Decision) -> Answer:
        """Count a decision, and say it as the wire wants it."""
        self._count(caller, subject, decision)
        if decision.lease_id is None and decision.reservation_id is None:
            return decided(decision, selection, None, None)
        return decided(decision, selection, *self._ids(caller, decision))

    def _count(self, caller: Caller, subject: str, decision: Decision) -> None:
        self._counters.count(caller, decision)
        if not decision.allowed:
            self._denied(caller.key.tenant_id, subject)

    def _ids(self, caller: Caller, decision: Decision) -> tuple[str | None, str | None]:
        tenant_id = caller.key.tenant_id
        return self._tickets.seal(tenant_id, decision.lease_id), self._tickets.seal(tenant_id, decision.reservation_id)

    # --- Many checks -------------------------------------------------------------------------------------------------

    def _batch(self, caller: Caller, body: bytes, tell: Tell) -> None:
        asked = read(_batch_body, body).checks
        if len(asked) > MAX_BATCH:
            raise InvalidInput("checks", f"at most {MAX_BATCH}, got {len(asked)}")
        task = asyncio.get_running_loop().create_task(self._judge(caller, asked, tell))
        self._cold.add(task)
        task.add_done_callback(self._cold.discard)

    async def _judge(self, caller: Caller, asked: list[Any], tell: Tell) -> None:
        try:
            tell(await self._judged(caller, asked))
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            tell(failed(error))

    async def _judged(self, caller: Caller, asked: list[Any]) -> Answer:
        answers: list[DecisionBody | Mapping[str, Any] | None] = []
        selections: list[Selection] = []
        requests: list[Request] = []
        for each in asked:
            try:
                selection, request = self.request(caller, _converted(each))
            except LimitforgeError as error:
                answers.append(problem_of(error).members)
                continue
            answers.append(None)
            selections.append(selection)
            requests.append(request)
        judged = iter(zip(await self._limiter.check_many(requests), selections, strict=True))
        for at, answer in enumerate(answers):
            if answer is None:
                decision, selection = next(judged)
                answers[at] = self._in_batch(caller, selection, str(asked[at]["subject"]), decision)
        return Answer(200, JSON, b"", _encode({"decisions": answers}))

    def _in_batch(
        self, caller: Caller, selection: Selection, subject: str, decision: Decision | LimitforgeError
    ) -> DecisionBody | Mapping[str, Any]:
        if not isinstance(decision, Decision):
            return problem_of(decision).members
        self._count(caller, subject, decision)
        return body_of(decision, selection, *self._ids(caller, decision))


def priority_of(caller: Caller, selection: Selection, resource: str) -> str:
    """Of a check that states none: the policy's or the tenant's; else reading is shed before writing, and test keys
    before both.
    """
    if selection.priority is not None:
        return selection.priority.value
    if caller.key.type is TEST:
        return "P3"
    return "P2" if resource.startswith(("GET:", "HEAD:")) else "P1"


def _converted(plain: Any) -> CheckBody:
    try:
        return msgspec.convert(plain, CheckBody)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
