"""The hot path: turn a key and the body of a check into a response.

The checks of concurrent requests are batched further down, in the store's pipeline.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import msgspec

from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope, KeyType
from limitforge.catalog.snapshot import Selection, Snapshot
from limitforge.core.check import Check, PreparedCheck
from limitforge.core.decision import CheckResult, CompactOutcome, Decision, Outcome, build_decision
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.errors import InvalidInput
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.checks.authentication import Authenticator
from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES
from limitforge.service.checks.invalid_bodies import InvalidBodyBudget
from limitforge.service.checks.request_bodies import CheckBody, decode_check, decode_small_check
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.response_templates import ResponseTemplate, TemplateCache
from limitforge.service.checks.responses import (
    JSON_TYPE,
    Response,
    decision_response,
    exception_response,
    problem_response,
)
from limitforge.service.checks.sealed_ids import IdSealer
from limitforge.service.counters.process_counters import ProcessCounters

MAX_PREPARED_RESOURCES = 128  # per caller, half a kilobyte each; when there are more, all are prepared again

OnResponse = Callable[[Response], None]
CallerHandler = Callable[[Caller, bytes, OnResponse], None]
"""Answers a request of a known caller: (caller, body, on_response)."""
IsConnected = Callable[[], bool]
"""Returns False once the client has disconnected."""

CLIENT_GONE = Response(499, JSON_TYPE, b"", b"")
"""Ends a request whose client has disconnected. It is never sent."""


def always_connected() -> bool:
    return True


class PreparedResource(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What all checks of one caller and resource have in common: the limits, the prepared check, and the response.

    Valid while the caller's snapshot is the same and the prepared check is current.
    """

    snapshot: Snapshot
    selection: Selection
    prepared_check: PreparedCheck
    response_template: ResponseTemplate | None


class CheckHandler:
    """Answers single checks, and holds what batches and the other calls of the tenant API share with them."""

    def __init__(
        self,
        limiter: Limiter,
        authenticator: Authenticator,
        id_sealer: IdSealer,
        counters: ProcessCounters,
        on_denied: Callable[[str, str], None],
    ) -> None:
        """`on_denied` is called with the tenant id and the subject of each denial."""
        self.authenticator = authenticator
        self.invalid_bodies = InvalidBodyBudget()
        self.handle = partial(self.run_for_caller, self._handle_check)
        """Answer a check: `handle(credentials, body, on_response, is_connected)`. See `run_for_caller`."""
        self._limiter = limiter
        self._submit_prepared = limiter.submit_prepared
        self._find_cached = authenticator.find_cached
        self._id_sealer = id_sealer
        self._counters = counters
        self._on_denied = on_denied
        self._templates = TemplateCache()
        self._tasks: set[asyncio.Task[None]] = set()

    def run_for_caller(
        self,
        answer: CallerHandler,
        credentials: Credentials,
        body: bytes,
        on_response: OnResponse,
        is_connected: IsConnected = always_connected,
    ) -> None:
        """Call `answer` with the caller of these credentials: at once if it is cached, else after a look-up.

        `on_response` is called exactly once, perhaps before this returns. If the client has disconnected by the end of
        the look-up, `answer` is not called.
        """
        caller = self._find_cached(credentials.fingerprint)
        if caller is None:
            self._start_task(self._run_after_lookup(answer, credentials, body, on_response, is_connected))
            return
        try:
            answer(caller, body, on_response)
            return
        except Exception as error:  # noqa: BLE001 - each request must be answered
            failure = error
        self.reject(caller, body, on_response, failure)

    def reject(self, caller: Caller | None, body: bytes, on_response: OnResponse, error: Exception) -> None:
        """Answer with an error, and charge the caller if the body was invalid.

        Call it outside of `except`: `on_response` parses the next request, whose errors would otherwise be chained to
        this one.
        """
        if caller is not None:
            self.invalid_bodies.charge_error(error, caller.key.id, len(body))
        on_response(exception_response(error))
        error.__traceback__ = None  # it keeps this frame and the body alive until the next garbage collection

    def build_request(self, caller: Caller, body: CheckBody) -> tuple[Selection, Request]:
        """Return the limits that apply to a check, and the request for the limiter. Raises InvalidInput."""
        selection = self.select(caller, body)
        return selection, Request(
            resource=selection.counted_resource or body.resource,
            subject=body.subject,
            limits=selection.limits,
            cost=body.cost,
            costs=body.costs,
            tenant=caller.key.tenant_id,
            priority=resolve_priority(caller, selection, body.resource, body.priority),
            shadow=selection.shadow,
            failure=selection.failure,
        )

    @staticmethod
    def select(caller: Caller, body: CheckBody) -> Selection:
        """Return the limits that apply to a check. Raises InvalidInput, or Forbidden if the key may not name a plan."""
        if not body.resource or not body.subject:
            raise InvalidInput("subject" if body.resource else "resource", "must not be empty")
        if body.plan_id is not None:
            caller.require(KeyScope.PLANS)
        return caller.tenant.snapshot.select(body.resource, caller.key.plan_id, body.plan_id)

    def decision_response(self, caller: Caller, selection: Selection, subject: str, decision: Decision) -> Response:
        """Count a decision and return its response."""
        self.count_decision(caller, subject, decision)
        if decision.lease_id is None and decision.reservation_id is None:
            return decision_response(decision, selection, None, None)
        return decision_response(decision, selection, *self.seal_ids(caller, decision))

    def count_decision(self, caller: Caller, subject: str, decision: Decision) -> None:
        self._counters.count_decision(
            caller,
            allowed=decision.allowed,
            would_deny=bool(decision.would_deny),
            degraded=decision.degraded is not None,
            overflow=decision.overflow,
        )
        if not decision.allowed:
            self._on_denied(caller.key.tenant_id, subject)

    def seal_ids(self, caller: Caller, decision: Decision) -> tuple[str | None, str | None]:
        """Return the lease id and the reservation id of a decision as the client receives them."""
        tenant_id, seal = caller.key.tenant_id, self._id_sealer.seal
        return seal(tenant_id, decision.lease_id), seal(tenant_id, decision.reservation_id)

    # --- With a look-up ----------------------------------------------------------------------------------------------

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_after_lookup(
        self,
        handle: CallerHandler,
        credentials: Credentials,
        body: bytes,
        on_response: OnResponse,
        is_connected: IsConnected,
    ) -> None:
        caller = None
        try:
            caller = await self.authenticator.authenticate(credentials, KeyScope.CHECK)
            if not is_connected():
                on_response(CLIENT_GONE)
                return
            handle(caller, body, on_response)
            return
        except Exception as error:  # noqa: BLE001 - each request must be answered
            failure = error
        self.reject(caller, body, on_response, failure)

    # --- One check ---------------------------------------------------------------------------------------------------

    def _handle_check(self, caller: Caller, body: bytes, on_response: OnResponse) -> None:
        check_body = decode_small_check(body)
        if check_body is None:
            if len(body) > SMALL_BODY_BYTES:
                self.invalid_bodies.require_budget(caller.key.id)
            check_body = decode_check(body)
        prepared: PreparedResource | None = caller.prepared_resources.get(
            (check_body.resource, check_body.priority, check_body.plan_id)
        )
        if (
            prepared is None
            or prepared.snapshot is not caller.tenant.snapshot
            or prepared.prepared_check.generation != prepared.prepared_check.keys.generation  # `is_current`, inlined
        ):
            prepared = self._prepare_resource(caller, check_body)
        subject = check_body.subject
        if not subject:
            raise InvalidInput("subject", "must not be empty")
        check = prepared.prepared_check.bind(subject, check_body.cost, check_body.costs)
        check.failure = prepared.selection.failure
        self._submit_prepared(check, partial(self._on_result, caller, prepared, check, subject, on_response))

    def _prepare_resource(self, caller: Caller, body: CheckBody) -> PreparedResource:
        """Prepare the checks of a resource, for its first check and after each change of the configuration."""
        caller.require(KeyScope.CHECK)
        selection = self.select(caller, body)
        prepared_check = self._limiter.prepare(
            selection.counted_resource or body.resource,
            limits=selection.limits,
            tenant=caller.key.tenant_id,
            priority=resolve_priority(caller, selection, body.resource, body.priority),
            shadow=selection.shadow,
        )
        prepared = PreparedResource(caller.tenant.snapshot, selection, prepared_check, self._templates.get(selection))
        if len(body.resource) <= MAX_KEY_PART_BYTES:  # a resource template may match longer ones
            if len(caller.prepared_resources) >= MAX_PREPARED_RESOURCES:
                caller.prepared_resources.clear()
            caller.prepared_resources[body.resource, body.priority, body.plan_id] = prepared
        return prepared

    def _on_result(
        self,
        caller: Caller,
        prepared: PreparedResource,
        check: Check,
        subject: str,
        on_response: OnResponse,
        result: CheckResult,
    ) -> None:
        try:
            if isinstance(result, CompactOutcome) and prepared.response_template is not None:  # nearly always
                response = prepared.response_template.render_admission(result.now_us, result.remaining_and_reset_us)
                self._counters.count_admission(caller)
            else:
                response = self._general_response(caller, prepared, check, subject, result)
        except Exception as error:  # noqa: BLE001 - each request must be answered
            response = exception_response(error)
        on_response(response)

    def _general_response(
        self, caller: Caller, prepared: PreparedResource, check: Check, subject: str, result: CheckResult
    ) -> Response:
        if isinstance(result, CompactOutcome):
            result = result.expand(check)
        if isinstance(result, Outcome):
            response = None if prepared.response_template is None else prepared.response_template.render(result)
            if response is not None:
                self._counters.count_decision(caller, allowed=result.allowed)
                if not result.allowed:
                    self._on_denied(caller.key.tenant_id, subject)
                return response
            result = build_decision(check, result)
        if isinstance(result, Decision):
            return self.decision_response(caller, prepared.selection, subject, result)
        return problem_response(result)


def resolve_priority(caller: Caller, selection: Selection, resource: str, priority: str | None) -> str:
    """Return the priority that a check states, else that of the policy or tenant, else a default.

    The default sheds reads before writes, and test keys before both.
    """
    if priority is not None:
        return priority
    if selection.priority is not None:
        return selection.priority.value
    if caller.key.type is KeyType.TEST:
        return "P3"
    return "P2" if resource.startswith(("GET:", "HEAD:")) else "P1"
