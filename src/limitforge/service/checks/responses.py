"""Responses as both HTTP front ends send them: status, header fields and an encoded body."""

import logging

import msgspec
from msgspec import UNSET, UnsetType

from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import Decision, LimitState
from limitforge.core.headers import encode_block
from limitforge.core.limits import Mode
from limitforge.errors import LimitforgeError
from limitforge.observability.events import log_event
from limitforge.service.problems import PROBLEM_JSON, QUOTA_EXCEEDED, problem_from_error, problem_type

JSON_TYPE = b"application/json"

_ON = Mode.ON
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class Response(msgspec.Struct, gc=False):
    """Status, content type, further header fields (one line each, names in lower case) and body."""

    status: int
    content_type: bytes
    headers: bytes
    body: bytes


class DecisionBody(msgspec.Struct, gc=False):
    """A decision in JSON. A member without information is left out."""

    allowed: bool
    limit: int | UnsetType
    remaining: int | UnsetType
    reset_at: int | UnsetType
    reset_after_ms: int | UnsetType
    retry_after_ms: int | None
    delay_ms: int | UnsetType
    binding: str | UnsetType
    limits: dict[str, LimitState]
    would_deny: tuple[str, ...] | UnsetType = UNSET
    degraded: str | UnsetType = UNSET
    overflow: bool | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    lease_id: str | UnsetType = UNSET
    reservation_id: str | UnsetType = UNSET
    shadow: "DecisionBody | UnsetType" = UNSET


class DenialProblem(msgspec.Struct, rename={"violated_policies": "violated-policies"}, gc=False):
    """The members that make a denied decision a problem document. They follow the members of the decision."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    violated_policies: list[str]


FAIL_CLOSED = DenialProblem(
    type=problem_type("store_unavailable"),
    title="The store is unavailable",
    status=503,
    detail="the store did not decide this check, so its failure behaviour (closed) denied it",
    code="store_unavailable",
    violated_policies=[],
)


def decision_response(
    decision: Decision, selection: Selection, lease_id: str | None, reservation_id: str | None
) -> Response:
    """Return the response to a check that was decided."""
    headers = selection.headers.block(decision)
    if decision.allowed:
        return Response(200, JSON_TYPE, headers, _encode(decision_body(decision, selection, lease_id, reservation_id)))
    problem = FAIL_CLOSED if decision.degraded == "closed" else _denial_problem(decision)
    body = _encode(decision_body(decision, selection, None, None))
    return Response(problem.status, PROBLEM_JSON, headers, merge_problem(body, problem))


def merge_problem(body: bytes, problem: DenialProblem) -> bytes:
    """Return one JSON object with the members of an encoded decision, then those of a problem."""
    return body[:-1] + b"," + _encode(problem)[1:]


def decision_body(
    decision: Decision, selection: Selection, lease_id: str | None, reservation_id: str | None
) -> DecisionBody:
    limit, binding, delay_ms = decision.limit, decision.binding, decision.delay_ms
    body = DecisionBody(
        decision.allowed,
        UNSET if limit is None else limit,
        UNSET if decision.remaining is None else decision.remaining,
        UNSET if decision.reset_at is None else decision.reset_at,
        UNSET if decision.reset_after_ms is None else decision.reset_after_ms,
        decision.retry_after_ms,
        UNSET if delay_ms is None else delay_ms,
        UNSET if binding is None else binding,
        decision.limits,
    )
    if decision.would_deny:
        body.would_deny = decision.would_deny
    if decision.degraded is not None:
        body.degraded = decision.degraded
    if decision.overflow:
        body.overflow = True
    if selection.mode is not _ON:
        body.mode = selection.mode.value
    if lease_id is not None:
        body.lease_id = lease_id
    if reservation_id is not None:
        body.reservation_id = reservation_id
    if decision.shadow is not None:
        body.shadow = decision_body(decision.shadow, selection, None, None)
    return body


def exception_response(error: Exception) -> Response:
    """Return the response to any error. An error that is not a LimitforgeError is a bug, and is logged."""
    if isinstance(error, LimitforgeError):
        return problem_response(error)
    log_event(_log, logging.ERROR, "service.internal_error", "unexpected error while answering", exc_info=error)
    return problem_response(LimitforgeError("unexpected"))


def problem_response(error: LimitforgeError) -> Response:
    problem = problem_from_error(error)
    return Response(problem.status, PROBLEM_JSON, encode_block(problem.headers), problem.body())


def quota_problem(binding: str | None, retry_after_seconds: object, violated: list[str]) -> DenialProblem:
    return _quota_exceeded(f"{binding} has no capacity left; retry in {retry_after_seconds} s", violated)


def _denial_problem(decision: Decision) -> DenialProblem:
    violated = [name for name, state in decision.limits.items() if not state.allowed and not state.monitored]
    if decision.retry_after_ms is None:
        return _quota_exceeded(f"{decision.binding} can never allow this cost; waiting does not help", violated)
    return quota_problem(decision.binding, -(-decision.retry_after_ms // 1_000) or 1, violated)


def _quota_exceeded(detail: str, violated: list[str]) -> DenialProblem:
    return DenialProblem(QUOTA_EXCEEDED, "Quota exceeded", 429, detail, "rate_limit_exceeded", violated)
