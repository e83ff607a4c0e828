"""The hot path: a key and a body become an answer. Both doors call it, and nothing here knows HTTP's framing."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from limitforge.catalog.cache import Snapshots
from limitforge.catalog.entries import Caller
from limitforge.catalog.model import KeyKind, KeyScope
from limitforge.catalog.snapshot import Selection, Snapshot
from limitforge.core.check import Check, Question, question_of
from limitforge.core.decision import Admission, Decision, Judged, Outcome, decision_of
from limitforge.core.keys import MAX_BYTES
from limitforge.errors import InvalidInput, LimitforgeError, UnknownKey
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.answers import JSON, Answer, DecisionBody, body_of, decided, failed, refused
from limitforge.service.batch_queue import BatchQueue
from limitforge.service.bodies import CheckBody, read_check, read_small_check, split_batch
from limitforge.service.counters import Counters
from limitforge.service.credentials import Who
from limitforge.service.problems import BadRequest, problem_of
from limitforge.service.refusals import SMALL_BODY, WRONG_CHECK_BYTES, RefusalBudget
from limitforge.service.templates import Template, Templates
from limitforge.service.tickets import Tickets

MAX_BODY = 65_536
MAX_BATCH_BODY = 1_048_576
SLICE = 50  # checks of a batch that are read, or decided and answered, before everything else gets its turn
MAX_ROUTES = 128  # of a caller, each in half a kilobyte; beyond that they are worked out again

CHECK = KeyScope.CHECK
PLANS = KeyScope.PLANS
TEST = KeyKind.TEST

Tell = Callable[[Answer], None]
Problem = Mapping[str, Any]
Work = Callable[[Caller, bytes, Tell], None]
IsWanted = Callable[[], bool]
"""False once the client has gone."""

NO_KEY = "send your key as `x-api-key`, or as `Authorization: Bearer`"
NOT_WANTED = Answer(499, JSON, b"", b"")
"""Goes nowhere: the client has gone."""

_encode = msgspec.json.Encoder().encode


def _always() -> bool:
    return True


class Route(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Where a caller's checks of one resource lead: what decides them, how that is asked, and how it is told. Good for
    as long as snapshot and generation are the same.
    """

    snapshot: Snapshot
    generation: int
    selection: Selection
    question: Question
    template: Template | None


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
        self._keys = limiter.store.keys
        self._ask = limiter.store.submit
        self._denied = denied
        self._snapshots = snapshots
        self._seen = snapshots.seen
        self._tickets = tickets
        self._counters = counters
        self.answered, self.answers = counters.answered, counters.answers
        self._templates = Templates()
        self._cold: set[asyncio.Task[None]] = set()
        self._batches = BatchQueue()
        self.refusals = RefusalBudget()

    def submit(self, who: Who, body: bytes, tell: Tell, is_wanted: IsWanted = _always) -> None:
        """`tell` is called once with the answer, perhaps before this returns. What has to wait is not decided if
        `is_wanted` says no by then.
        """
        caller = self._seen(who.seen)
        if caller is None:
            self._start(self._later(self._check, who, body, tell, is_wanted))
            return
        try:
            self._check(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._refuse(caller, body, tell, reason)

    def submit_batch(self, who: Who, body: bytes, tell: Tell, is_wanted: IsWanted = _always) -> None:
        work = partial(self._batch, is_wanted, who)
        caller = self._seen(who.seen)
        if caller is None:
            self._start(self._later(work, who, body, tell, is_wanted))
            return
        try:
            caller.require(CHECK)
            work(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._refuse(caller, body, tell, reason)

    def is_known(self, who: Who) -> bool:
        """Whether this process knows the key, so that no look-up is needed."""
        return self._seen(who.seen) is not None

    def objection(self, who: Who) -> UnknownKey | None:
        """To a key that was never issued, without a look-up: its request need not be read to its end."""
        if who.key is None:
            return UnknownKey(NO_KEY)
        return UnknownKey("no such key") if self._snapshots.is_made_up(who.key) else None

    async def caller(self, who: Who, scope: KeyScope) -> Caller:
        """Whoever presents this key, if it may do this."""
        if who.key is None:
            raise UnknownKey(NO_KEY)
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
        if body.plan_id is not None:
            caller.require(PLANS)
        return caller.tenant.snapshot.select(body.resource, caller.key.plan_id, body.plan_id)

    # --- One check ---------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._cold.add(task)
        task.add_done_callback(self._cold.discard)

    async def _later(self, work: Work, who: Who, body: bytes, tell: Tell, is_wanted: IsWanted) -> None:
        """The first time that a key is seen, or what takes time anyway."""
        caller = None
        try:
            caller = await self.caller(who, CHECK)
            if not is_wanted():
                tell(NOT_WANTED)
                return
            work(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._refuse(caller, body, tell, reason)

    def _refuse(self, caller: Caller | None, body: bytes, tell: Tell, error: Exception) -> None:
        """Answer an error, and charge the caller if the body was invalid.

        Call it outside of `except`: `tell` reads the next request, whose errors would carry this one as their context.
        """
        if caller is not None:
            self.refusals.charge_for(error, caller.key.id, len(body))
        tell(failed(error))
        error.__traceback__ = None  # it refers to this frame and its body, until garbage is collected

    def _check(self, caller: Caller, body: bytes, tell: Tell) -> None:
        asked = read_small_check(body)
        if asked is None:
            if len(body) > SMALL_BODY:
                self.refusals.require(caller.key.id)
            asked = read_check(body)
        route: Route | None = caller.routes.get((asked.resource, asked.priority, asked.plan_id))
        if route is None or route.snapshot is not caller.tenant.snapshot or route.generation != self._keys.generation:
            route = self._route(caller, asked)
        subject = asked.subject
        if not subject:
            raise InvalidInput("subject", "must not be empty")
        check = route.question.check(subject, asked.cost, asked.costs)
        check.failure, check.is_raw = route.selection.failure, True
        self._ask(check, partial(self._judged, caller, route, check, subject, tell))

    def _route(self, caller: Caller, asked: CheckBody) -> Route:
        """Worked out when a caller first asks for a resource, and after a change."""
        caller.require(CHECK)
        selection = self.select(caller, asked)
        question = question_of(
            self._keys,
            self._keys.generation,
            selection.limits,
            selection.template or asked.resource,
            caller.key.tenant_id,
            priority_of(caller, selection, asked.resource) if asked.priority is None else asked.priority,
            selection.shadow,
        )
        template = self._templates.of(selection)
        route = Route(caller.tenant.snapshot, question.generation, selection, question, template)
        if len(asked.resource) <= MAX_BYTES:  # a template may stand for longer ones
            if len(caller.routes) >= MAX_ROUTES:
                caller.routes.clear()
            caller.routes[asked.resource, asked.priority, asked.plan_id] = route
        return route

    def _judged(self, caller: Caller, route: Route, check: Check, subject: str, tell: Tell, judged: Judged) -> None:
        try:
            if isinstance(judged, Admission) and route.template is not None:  # nearly always
                answer = route.template.admission(judged.now_us, judged.numbers)
                self._counters.admitted(caller)
            else:
                answer = self._answer(caller, route, check, subject, judged)
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            answer = failed(error)
        tell(answer)

    def _answer(self, caller: Caller, route: Route, check: Check, subject: str, judged: Judged) -> Answer:
        if isinstance(judged, Admission):
            judged = judged.outcome(check)
        if isinstance(judged, Outcome):
            answer = None if route.template is None else route.template.answer(judged)
            if answer is not None:
                self._counters.count(caller, allowed=judged.allowed)
                if not judged.allowed:
                    self._denied(caller.key.tenant_id, subject)
                return answer
            judged = decision_of(check, judged)
        if isinstance(judged, Decision):
            return self.decided(caller, route.selection, subject, judged)
        return refused(judged)

    def decided(self, caller: Caller, selection: Selection, subject: str, decision: Decision) -> Answer:
        """Count a decision, and say it as the wire wants it."""
        self._count(caller, subject, decision)
        if decision.lease_id is None and decision.reservation_id is None:
            return decided(decision, selection, None, None)
        return decided(decision, selection, *self._ids(caller, decision))

    def _count(self, caller: Caller, subject: str, decision: Decision) -> None:
        self._counters.count(
            caller,
            allowed=decision.allowed,
            would_deny=bool(decision.would_deny),
            degraded=decision.degraded is not None,
            overflow=decision.overflow,
        )
        if not decision.allowed:
            self._denied(caller.key.tenant_id, subject)

    def _ids(self, caller: Caller, decision: Decision) -> tuple[str | None, str | None]:
        tenant_id = caller.key.tenant_id
        return self._tickets.seal(tenant_id, decision.lease_id), self._tickets.seal(tenant_id, decision.reservation_id)

    # --- Many checks -------------------------------------------------------------------------------------------------

    def _batch(self, is_wanted: IsWanted, who: Who, caller: Caller, body: bytes, tell: Tell) -> None:
        self.refusals.require(caller.key.id)
        start = partial(self._judge_batch, is_wanted, who, caller, body, tell)
        self._batches.submit(caller.key.tenant_id, len(body), start, lambda error: tell(failed(error)))

    async def _judge_batch(self, is_wanted: IsWanted, who: Who, caller: Caller, body: bytes, tell: Tell) -> None:
        if not is_wanted():
            tell(NOT_WANTED)
            return
        try:
            self.refusals.require(caller.key.id)  # it may have been spent while this one waited
            answer = await self._judged_batch(who, await self._read_batch(caller, body))
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        else:
            tell(answer)
            return
        self._refuse(caller, body, tell, reason)

    async def _read_batch(self, caller: Caller, body: bytes) -> list[CheckBody | Problem]:
        """Return all checks, before any is decided: a body that is not JSON must take nothing."""
        if len(body) > SMALL_BODY:
            await self._batches.pause(SLICE)
        asked: list[CheckBody | Problem] = []
        size = 0
        for at, encoded in enumerate(split_batch(body)):
            if (at and at % SLICE == 0) or size > MAX_BODY:
                await self._batches.pause(SLICE)
                size = 0
            one = bytes(encoded)
            size += len(one)
            if len(one) > MAX_BODY:
                raise BadRequest(413, "body_too_large", f"checks[{at}]: at most {MAX_BODY} bytes, got {len(one)}")
            asked.append(self._read_one(caller, one))
        return asked

    def _read_one(self, caller: Caller, body: bytes) -> CheckBody | Problem:
        try:
            return read_small_check(body) or read_check(body)
        except InvalidInput as error:
            return self._problem(caller, error, len(body))

    async def _judged_batch(self, who: Who, asked: list[CheckBody | Problem]) -> Answer:
        parts = []
        for start in range(0, len(asked), SLICE):
            await self._batches.pause(min(len(asked) - start, SLICE))
            caller = await self.caller(who, CHECK)  # the key may have been revoked meanwhile
            answers = await self._judged_slice(caller, asked[start : start + SLICE])
            parts.append(_encode(answers)[1:-1])
        return Answer(200, JSON, b"", b'{"decisions":[%b]}' % b",".join(parts))

    async def _judged_slice(
        self, caller: Caller, asked: Sequence[CheckBody | Problem]
    ) -> list[DecisionBody | Problem | None]:
        answers: list[DecisionBody | Problem | None] = []
        waiting: list[tuple[int, Selection, str]] = []
        requests: list[Request] = []
        for at, each in enumerate(asked):
            if not isinstance(each, CheckBody):
                answers.append(each)
                continue
            try:
                selection, request = self.request(caller, each)
            except LimitforgeError as error:
                answers.append(self._problem(caller, error))
                continue
            answers.append(None)
            waiting.append((at, selection, each.subject))
            requests.append(request)
        decisions = await self._limiter.check_many(requests)
        for (at, selection, subject), decision in zip(waiting, decisions, strict=True):
            answers[at] = self._in_batch(caller, selection, subject, decision)
        return answers

    def _in_batch(
        self, caller: Caller, selection: Selection, subject: str, decision: Decision | LimitforgeError
    ) -> DecisionBody | Problem:
        if not isinstance(decision, Decision):
            return self._problem(caller, decision)
        self._count(caller, subject, decision)
        return body_of(decision, selection, *self._ids(caller, decision))

    def _problem(self, caller: Caller, error: LimitforgeError, size: int = 0) -> Problem:
        """Return what stands in the place of a check that is itself wrong, and charge the caller for reading it."""
        if isinstance(error, InvalidInput):
            self.refusals.charge(caller.key.id, max(size, WRONG_CHECK_BYTES))
        return problem_of(error).members


def priority_of(caller: Caller, selection: Selection, resource: str) -> str:
    """Of a check that states none: the policy's or the tenant's; else reading is shed before writing, and test keys
    before both.
    """
    if selection.priority is not None:
        return selection.priority.value
    if caller.key.type is TEST:
        return "P3"
    return "P2" if resource.startswith(("GET:", "HEAD:")) else "P1"
