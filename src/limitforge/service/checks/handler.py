"""The hot path: a key and a body become an answer. Both doors call it, and nothing here knows HTTP's framing."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope, KeyType
from limitforge.catalog.snapshot import Selection, Snapshot
from limitforge.core.check import Check, PreparedCheck, ResultKind, prepare_check
from limitforge.core.decision import CheckResult, CompactOutcome, Decision, Outcome, build_decision
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.errors import InvalidInput, LimitforgeError, UnknownKey
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.checks.batch_queue import BatchQueue
from limitforge.service.checks.invalid_bodies import INVALID_CHECK_BYTES, SMALL_BODY, InvalidBodyBudget
from limitforge.service.checks.request_bodies import CheckBody, decode_check, decode_small_check, split_batch
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.response_templates import ResponseTemplate, TemplateCache
from limitforge.service.checks.responses import (
    JSON_TYPE,
    DecisionBody,
    Response,
    decision_body,
    decision_response,
    exception_response,
    problem_response,
)
from limitforge.service.checks.sealed_ids import IdSealer
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.problems import HttpError, problem_from_error

MAX_BODY = 65_536
MAX_BATCH_BODY = 1_048_576
SLICE_CHECKS = 50  # checks of a batch that are read, or decided and answered, before everything else gets its turn
MAX_PREPARED_ROUTES = 128  # of a caller, each in half a kilobyte; beyond that they are worked out again

CHECK = KeyScope.CHECK
PLANS = KeyScope.PLANS
TEST = KeyType.TEST

OnResponse = Callable[[Response], None]
ProblemDict = Mapping[str, Any]
CheckWork = Callable[[Caller, bytes, OnResponse], None]
IsConnected = Callable[[], bool]
"""False once the client has gone."""

NO_KEY_DETAIL = "send your key as `x-api-key`, or as `Authorization: Bearer`"
CLIENT_GONE = Response(499, JSON_TYPE, b"", b"")
"""Goes nowhere: the client has gone."""

_encode = msgspec.json.Encoder().encode


def _always_connected() -> bool:
    return True


class PreparedRoute(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Where a caller's checks of one resource lead: what decides them, how that is asked, and how it is told. Good for
    as long as snapshot and generation are the same.
    """

    snapshot: Snapshot
    generation: int
    selection: Selection
    prepared: PreparedCheck
    template: ResponseTemplate | None


class CheckHandler:
    """Decides checks for whoever presents a key."""

    def __init__(
        self,
        limiter: Limiter,
        snapshots: CatalogCache,
        tickets: IdSealer,
        counters: ProcessCounters,
        denied: Callable[[str, str], None],
    ) -> None:
        """`denied` hears of each denial: whose, and of whom."""
        self._limiter = limiter
        self._keys = limiter.store.keys
        self._submit = limiter.store.submit
        self._on_denied = denied
        self._snapshots = snapshots
        self._find_cached = snapshots.callers.get_by_fingerprint
        self._id_sealer = tickets
        self._counters = counters
        self.count_response, self.status_counts = counters.count_response, counters.status_counts
        self._templates = TemplateCache()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch_queue = BatchQueue()
        self.invalid_bodies = InvalidBodyBudget()

    def submit(
        self, who: Credentials, body: bytes, tell: OnResponse, is_wanted: IsConnected = _always_connected
    ) -> None:
        """`tell` is called once with the answer, perhaps before this returns. What has to wait is not decided if
        `is_wanted` says no by then.
        """
        caller = self._find_cached(who.fingerprint)
        if caller is None:
            self._start_task(self._run_after_lookup(self._handle_check, who, body, tell, is_wanted))
            return
        try:
            self._handle_check(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._reject(caller, body, tell, reason)

    def submit_batch(
        self, who: Credentials, body: bytes, tell: OnResponse, is_wanted: IsConnected = _always_connected
    ) -> None:
        work = partial(self._queue_batch, is_wanted, who)
        caller = self._find_cached(who.fingerprint)
        if caller is None:
            self._start_task(self._run_after_lookup(work, who, body, tell, is_wanted))
            return
        try:
            caller.require(CHECK)
            work(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._reject(caller, body, tell, reason)

    def is_known(self, who: Credentials) -> bool:
        """Whether this process knows the key, so that no look-up is needed."""
        return self._find_cached(who.fingerprint) is not None

    def early_rejection(self, who: Credentials) -> UnknownKey | None:
        """To a key that was never issued, without a look-up: its request need not be read to its end."""
        if who.key is None:
            return UnknownKey(NO_KEY_DETAIL)
        return UnknownKey("no such key") if self._snapshots.callers.is_invalid_key(who.key) else None

    async def authenticate(self, who: Credentials, scope: KeyScope) -> Caller:
        """Whoever presents this key, if it may do this."""
        if who.key is None:
            raise UnknownKey(NO_KEY_DETAIL)
        caller = self._snapshots.callers.get_by_fingerprint(who.fingerprint) or await self._snapshots.callers.find(
            who.key, who.source
        )
        caller.require(scope)
        return caller

    def build_request(self, caller: Caller, body: CheckBody) -> tuple[Selection, Request]:
        """What the limiter is asked for; refused where a field makes no sense."""
        selection = self.select(caller, body)
        return selection, Request(
            resource=selection.template or body.resource,
            subject=body.subject,
            limits=selection.limits,
            cost=body.cost,
            costs=body.costs,
            tenant=caller.key.tenant_id,
            priority=default_priority(caller, selection, body.resource) if body.priority is None else body.priority,
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

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_after_lookup(
        self, work: CheckWork, who: Credentials, body: bytes, tell: OnResponse, is_wanted: IsConnected
    ) -> None:
        """The first time that a key is seen, or what takes time anyway."""
        caller = None
        try:
            caller = await self.authenticate(who, CHECK)
            if not is_wanted():
                tell(CLIENT_GONE)
                return
            work(caller, body, tell)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        self._reject(caller, body, tell, reason)

    def _reject(self, caller: Caller | None, body: bytes, tell: OnResponse, error: Exception) -> None:
        """Answer an error, and charge the caller if the body was invalid.

        Call it outside of `except`: `tell` reads the next request, whose errors would carry this one as their context.
        """
        if caller is not None:
            self.invalid_bodies.charge_error(error, caller.key.id, len(body))
        tell(exception_response(error))
        error.__traceback__ = None  # it refers to this frame and its body, until garbage is collected

    def _handle_check(self, caller: Caller, body: bytes, tell: OnResponse) -> None:
        asked = decode_small_check(body)
        if asked is None:
            if len(body) > SMALL_BODY:
                self.invalid_bodies.require(caller.key.id)
            asked = decode_check(body)
        route: PreparedRoute | None = caller.routes.get((asked.resource, asked.priority, asked.plan_id))
        if route is None or route.snapshot is not caller.tenant.snapshot or route.generation != self._keys.generation:
            route = self._prepare_route(caller, asked)
        subject = asked.subject
        if not subject:
            raise InvalidInput("subject", "must not be empty")
        check = route.prepared.bind(subject, asked.cost, asked.costs)
        check.failure, check.result_kind = route.selection.failure, ResultKind.OUTCOME
        self._submit(check, partial(self._on_result, caller, route, check, subject, tell))

    def _prepare_route(self, caller: Caller, asked: CheckBody) -> PreparedRoute:
        """Worked out when a caller first asks for a resource, and after a change."""
        caller.require(CHECK)
        selection = self.select(caller, asked)
        question = prepare_check(
            self._keys,
            self._keys.generation,
            selection.limits,
            selection.template or asked.resource,
            caller.key.tenant_id,
            default_priority(caller, selection, asked.resource) if asked.priority is None else asked.priority,
            selection.shadow,
        )
        template = self._templates.get(selection)
        route = PreparedRoute(caller.tenant.snapshot, question.generation, selection, question, template)
        if len(asked.resource) <= MAX_KEY_PART_BYTES:  # a template may stand for longer ones
            if len(caller.routes) >= MAX_PREPARED_ROUTES:
                caller.routes.clear()
            caller.routes[asked.resource, asked.priority, asked.plan_id] = route
        return route

    def _on_result(
        self, caller: Caller, route: PreparedRoute, check: Check, subject: str, tell: OnResponse, judged: CheckResult
    ) -> None:
        try:
            if isinstance(judged, CompactOutcome) and route.template is not None:  # nearly always
                answer = route.template.render_admission(judged.now_us, judged.remaining_and_reset_us)
                self._counters.count_admission(caller)
            else:
                answer = self._general_response(caller, route, check, subject, judged)
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            answer = exception_response(error)
        tell(answer)

    def _general_response(
        self, caller: Caller, route: PreparedRoute, check: Check, subject: str, judged: CheckResult
    ) -> Response:
        if isinstance(judged, CompactOutcome):
            judged = judged.expand(check)
        if isinstance(judged, Outcome):
            answer = None if route.template is None else route.template.render(judged)
            if answer is not None:
                self._counters.count_decision(caller, allowed=judged.allowed)
                if not judged.allowed:
                    self._on_denied(caller.key.tenant_id, subject)
                return answer
            judged = build_decision(check, judged)
        if isinstance(judged, Decision):
            return self.decision_response(caller, route.selection, subject, judged)
        return problem_response(judged)

    def decision_response(self, caller: Caller, selection: Selection, subject: str, decision: Decision) -> Response:
        """Count a decision, and say it as the wire wants it."""
        self._count_decision(caller, subject, decision)
        if decision.lease_id is None and decision.reservation_id is None:
            return decision_response(decision, selection, None, None)
        return decision_response(decision, selection, *self._seal_ids(caller, decision))

    def _count_decision(self, caller: Caller, subject: str, decision: Decision) -> None:
        self._counters.count_decision(
            caller,
            allowed=decision.allowed,
            would_deny=bool(decision.would_deny),
            degraded=decision.degraded is not None,
            overflow=decision.overflow,
        )
        if not decision.allowed:
            self._on_denied(caller.key.tenant_id, subject)

    def _seal_ids(self, caller: Caller, decision: Decision) -> tuple[str | None, str | None]:
        tenant_id = caller.key.tenant_id
        return self._id_sealer.seal(tenant_id, decision.lease_id), self._id_sealer.seal(
            tenant_id, decision.reservation_id
        )

    # --- Many checks -------------------------------------------------------------------------------------------------

    def _queue_batch(
        self, is_wanted: IsConnected, who: Credentials, caller: Caller, body: bytes, tell: OnResponse
    ) -> None:
        self.invalid_bodies.require(caller.key.id)
        start = partial(self._handle_batch, is_wanted, who, caller, body, tell)
        self._batch_queue.submit(caller.key.tenant_id, len(body), start, lambda error: tell(exception_response(error)))

    async def _handle_batch(
        self, is_wanted: IsConnected, who: Credentials, caller: Caller, body: bytes, tell: OnResponse
    ) -> None:
        if not is_wanted():
            tell(CLIENT_GONE)
            return
        try:
            self.invalid_bodies.require(caller.key.id)  # it may have been spent while this one waited
            answer = await self._decide_batch(who, await self._read_batch(caller, body))
        except Exception as error:  # noqa: BLE001 - whatever it is: who asked must be told
            reason = error
        else:
            tell(answer)
            return
        self._reject(caller, body, tell, reason)

    async def _read_batch(self, caller: Caller, body: bytes) -> list[CheckBody | ProblemDict]:
        """Return all checks, before any is decided: a body that is not JSON must take nothing."""
        if len(body) > SMALL_BODY:
            await self._batch_queue.wait_for_turn(SLICE_CHECKS)
        asked: list[CheckBody | ProblemDict] = []
        size = 0
        for at, encoded in enumerate(split_batch(body)):
            if (at and at % SLICE_CHECKS == 0) or size > MAX_BODY:
                await self._batch_queue.wait_for_turn(SLICE_CHECKS)
                size = 0
            one = bytes(encoded)
            size += len(one)
            if len(one) > MAX_BODY:
                raise HttpError(413, "body_too_large", f"checks[{at}]: at most {MAX_BODY} bytes, got {len(one)}")
            asked.append(self._read_one(caller, one))
        return asked

    def _read_one(self, caller: Caller, body: bytes) -> CheckBody | ProblemDict:
        try:
            return decode_small_check(body) or decode_check(body)
        except InvalidInput as error:
            return self._member_problem(caller, error, len(body))

    async def _decide_batch(self, who: Credentials, asked: list[CheckBody | ProblemDict]) -> Response:
        parts = []
        for start in range(0, len(asked), SLICE_CHECKS):
            await self._batch_queue.wait_for_turn(min(len(asked) - start, SLICE_CHECKS))
            caller = await self.authenticate(who, CHECK)  # the key may have been revoked meanwhile
            answers = await self._decide_slice(caller, asked[start : start + SLICE_CHECKS])
            parts.append(_encode(answers)[1:-1])
        return Response(200, JSON_TYPE, b"", b'{"decisions":[%b]}' % b",".join(parts))

    async def _decide_slice(
        self, caller: Caller, asked: Sequence[CheckBody | ProblemDict]
    ) -> list[DecisionBody | ProblemDict | None]:
        answers: list[DecisionBody | ProblemDict | None] = []
        waiting: list[tuple[int, Selection, str]] = []
        requests: list[Request] = []
        for at, each in enumerate(asked):
            if not isinstance(each, CheckBody):
                answers.append(each)
                continue
            try:
                selection, request = self.build_request(caller, each)
            except LimitforgeError as error:
                answers.append(self._member_problem(caller, error))
                continue
            answers.append(None)
            waiting.append((at, selection, each.subject))
            requests.append(request)
        decisions = await self._limiter.check_many(requests)
        for (at, selection, subject), decision in zip(waiting, decisions, strict=True):
            answers[at] = self._batch_member(caller, selection, subject, decision)
        return answers

    def _batch_member(
        self, caller: Caller, selection: Selection, subject: str, decision: Decision | LimitforgeError
    ) -> DecisionBody | ProblemDict:
        if not isinstance(decision, Decision):
            return self._member_problem(caller, decision)
        self._count_decision(caller, subject, decision)
        return decision_body(decision, selection, *self._seal_ids(caller, decision))

    def _member_problem(self, caller: Caller, error: LimitforgeError, size: int = 0) -> ProblemDict:
        """Return what stands in the place of a check that is itself wrong, and charge the caller for reading it."""
        if isinstance(error, InvalidInput):
            self.invalid_bodies.charge(caller.key.id, max(size, INVALID_CHECK_BYTES))
        return problem_from_error(error).members


def default_priority(caller: Caller, selection: Selection, resource: str) -> str:
    """Of a check that states none: the policy's or the tenant's; else reading is shed before writing, and test keys
    before both.
    """
    if selection.priority is not None:
        return selection.priority.value
    if caller.key.type is TEST:
        return "P3"
    return "P2" if resource.startswith(("GET:", "HEAD:")) else "P1"
