"""Answer batches: up to 1,000 checks in one request, each decided on its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import Decision
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.checks.batch_queue import BatchQueue
from limitforge.service.checks.handler import (
    CHECK,
    CLIENT_GONE,
    MAX_BODY,
    CheckHandler,
    IsConnected,
    OnResponse,
    always_connected,
)
from limitforge.service.checks.invalid_bodies import INVALID_CHECK_BYTES, SMALL_BODY
from limitforge.service.checks.request_bodies import CheckBody, decode_check, decode_small_check, split_batch
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.responses import JSON_TYPE, DecisionBody, Response, decision_body, exception_response
from limitforge.service.problems import HttpError, problem_from_error

MAX_BATCH_BODY = 1_048_576
SLICE_CHECKS = 50  # checks of a batch that are parsed, or decided and encoded, before other work gets its turn

ProblemMembers = Mapping[str, Any]

_encode = msgspec.json.Encoder().encode


class BatchHandler:
    """Parses and decides batches in slices, so that a large batch does not delay other requests."""

    def __init__(self, limiter: Limiter, checks: CheckHandler) -> None:
        self._limiter = limiter
        self._checks = checks
        self._authenticate = checks.authenticator.authenticate
        self._queue = BatchQueue()

    def submit(
        self,
        credentials: Credentials,
        body: bytes,
        on_response: OnResponse,
        is_connected: IsConnected = always_connected,
    ) -> None:
        """Answer a batch. `on_response` and `is_connected` are those of `CheckHandler.run_for_caller`."""
        work = partial(self._enqueue, credentials, is_connected)
        self._checks.run_for_caller(work, credentials, body, on_response, is_connected)

    def _enqueue(
        self, credentials: Credentials, is_connected: IsConnected, caller: Caller, body: bytes, on_response: OnResponse
    ) -> None:
        caller.require(CHECK)
        self._checks.invalid_bodies.require(caller.key.id)
        start = partial(self._handle, credentials, is_connected, caller, body, on_response)
        self._queue.submit(caller.key.tenant_id, len(body), start, lambda error: on_response(exception_response(error)))

    async def _handle(
        self, credentials: Credentials, is_connected: IsConnected, caller: Caller, body: bytes, on_response: OnResponse
    ) -> None:
        if not is_connected():
            on_response(CLIENT_GONE)
            return
        try:
            self._checks.invalid_bodies.require(caller.key.id)  # it may have been spent while this batch waited
            response = await self._decide(credentials, await self._parse(caller, body))
        except Exception as error:  # noqa: BLE001 - each request must be answered
            failure = error
        else:
            on_response(response)
            return
        self._checks.reject(caller, body, on_response, failure)

    async def _parse(self, caller: Caller, body: bytes) -> list[CheckBody | ProblemMembers]:
        """Return all checks before any is decided: a body that is not valid JSON must not take capacity."""
        if len(body) > SMALL_BODY:
            await self._queue.wait_for_turn(SLICE_CHECKS)
        parsed: list[CheckBody | ProblemMembers] = []
        size = 0
        for index, raw_check in enumerate(split_batch(body)):
            if (index and index % SLICE_CHECKS == 0) or size > MAX_BODY:
                await self._queue.wait_for_turn(SLICE_CHECKS)
                size = 0
            check = bytes(raw_check)
            size += len(check)
            if len(check) > MAX_BODY:
                detail = f"checks[{index}]: at most {MAX_BODY} bytes, got {len(check)}"
                raise HttpError(413, "body_too_large", detail)
            parsed.append(self._parse_check(caller, check))
        return parsed

    def _parse_check(self, caller: Caller, body: bytes) -> CheckBody | ProblemMembers:
        try:
            return decode_small_check(body) or decode_check(body)
        except InvalidInput as error:
            return self._problem(caller, error, len(body))

    async def _decide(self, credentials: Credentials, checks: list[CheckBody | ProblemMembers]) -> Response:
        parts = []
        for start in range(0, len(checks), SLICE_CHECKS):
            await self._queue.wait_for_turn(min(len(checks) - start, SLICE_CHECKS))
            caller = await self._authenticate(credentials, CHECK)  # the key may have been revoked meanwhile
            results = await self._decide_slice(caller, checks[start : start + SLICE_CHECKS])
            parts.append(_encode(results)[1:-1])
        return Response(200, JSON_TYPE, b"", b'{"decisions":[%b]}' % b",".join(parts))

    async def _decide_slice(
        self, caller: Caller, checks: Sequence[CheckBody | ProblemMembers]
    ) -> list[DecisionBody | ProblemMembers | None]:
        results: list[DecisionBody | ProblemMembers | None] = []
        pending: list[tuple[int, Selection, str]] = []
        requests: list[Request] = []
        for index, check in enumerate(checks):
            if not isinstance(check, CheckBody):
                results.append(check)
                continue
            try:
                selection, request = self._checks.build_request(caller, check)
            except LimitforgeError as error:
                results.append(self._problem(caller, error))
                continue
            results.append(None)
            pending.append((index, selection, check.subject))
            requests.append(request)
        decisions = await self._limiter.check_many(requests)
        for (index, selection, subject), decision in zip(pending, decisions, strict=True):
            results[index] = self._result(caller, selection, subject, decision)
        return results

    def _result(
        self, caller: Caller, selection: Selection, subject: str, decision: Decision | LimitforgeError
    ) -> DecisionBody | ProblemMembers:
        if not isinstance(decision, Decision):
            return self._problem(caller, decision)
        self._checks.count_decision(caller, subject, decision)
        return decision_body(decision, selection, *self._checks.seal_ids(caller, decision))

    def _problem(self, caller: Caller, error: LimitforgeError, size: int = 0) -> ProblemMembers:
        """Return the problem document of one check, and charge the caller if the check was invalid."""
        if isinstance(error, InvalidInput):
            self._checks.invalid_bodies.charge(caller.key.id, max(size, INVALID_CHECK_BYTES))
        return problem_from_error(error).members
