"""Answer batches: up to 1,000 checks in one request, each decided on its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope
from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import Decision
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.limiter import Limiter
from limitforge.request import Request
from limitforge.service.checks.batch_queue import BatchQueue
from limitforge.service.checks.body_sizes import MAX_BODY_BYTES, SMALL_BODY_BYTES
from limitforge.service.checks.handler import (
    CLIENT_GONE,
    CheckHandler,
    IsConnected,
    OnResponse,
    always_connected,
)
from limitforge.service.checks.invalid_bodies import INVALID_CHECK_BYTES
from limitforge.service.checks.request_bodies import CheckBody, decode_check, decode_small_check, split_batch
from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.checks.responses import JSON_TYPE, DecisionBody, Response, decision_body, exception_response
from limitforge.service.problems import HttpError, problem_from_error

SLICE_CHECKS = 50  # checks of a batch that are parsed, or decided and encoded, before other work gets its turn

ProblemMembers = Mapping[str, Any]

_encode = msgspec.json.Encoder().encode


class BatchHandler:
    """Parses and decides batches in slices, so that a large batch does not delay other requests."""

    def __init__(self, limiter: Limiter, check_handler: CheckHandler) -> None:
        self._limiter = limiter
        self._check_handler = check_handler
        self._authenticate = check_handler.authenticator.authenticate
        self._queue = BatchQueue()

    def handle(
        self,
        credentials: Credentials,
        body: bytes,
        on_response: OnResponse,
        is_connected: IsConnected = always_connected,
    ) -> None:
        """Answer a batch. `on_response` and `is_connected` are those of `CheckHandler.run_for_caller`."""
        answer = partial(self._enqueue, credentials, is_connected)
        self._check_handler.run_for_caller(answer, credentials, body, on_response, is_connected)

    def _enqueue(
        self, credentials: Credentials, is_connected: IsConnected, caller: Caller, body: bytes, on_response: OnResponse
    ) -> None:
        caller.require(KeyScope.CHECK)
        self._check_handler.invalid_bodies.require_budget(caller.key.id)
        start = partial(self._answer, credentials, is_connected, caller, body, on_response)
        self._queue.enqueue(
            caller.key.tenant_id, len(body), start, lambda error: on_response(exception_response(error))
        )

    async def _answer(
        self, credentials: Credentials, is_connected: IsConnected, caller: Caller, body: bytes, on_response: OnResponse
    ) -> None:
        if not is_connected():
            on_response(CLIENT_GONE)
            return
        try:
            # The budget may have been spent while this batch waited.
            self._check_handler.invalid_bodies.require_budget(caller.key.id)
            response = await self._decide(credentials, await self._parse(caller, body))
        except Exception as error:  # noqa: BLE001 - each request must be answered
            failure = error
        else:
            on_response(response)
            return
        self._check_handler.reject(caller, body, on_response, failure)

    async def _parse(self, caller: Caller, body: bytes) -> list[CheckBody | ProblemMembers]:
        """Return all checks before any is decided: a body that is not valid JSON must not take capacity."""
        if len(body) > SMALL_BODY_BYTES:
            await self._queue.wait_for_turn(SLICE_CHECKS)
        parsed: list[CheckBody | ProblemMembers] = []
        size = 0
        for index, raw_check in enumerate(split_batch(body)):
            if (index and index % SLICE_CHECKS == 0) or size > MAX_BODY_BYTES:
                await self._queue.wait_for_turn(SLICE_CHECKS)
                size = 0
            check = bytes(raw_check)
            size += len(check)
            if len(check) > MAX_BODY_BYTES:
                detail = f"checks[{index}]: at most {MAX_BODY_BYTES} bytes, got {len(check)}"
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
            caller = await self._authenticate(credentials, KeyScope.CHECK)  # the key may have been revoked meanwhile
            results = await self._decide_slice(caller, checks[start : start + SLICE_CHECKS])
            parts.append(_encode(results)[1:-1])
        return Response(200, JSON_TYPE, b"", b'{"decisions":[%b]}' % b",".join(parts))

    async def _decide_slice(
        self, caller: Caller, checks: Sequence[CheckBody | ProblemMembers]
    ) -> list[DecisionBody | ProblemMembers | None]:
        results: list[DecisionBody | ProblemMembers | None] = []
        valid: list[tuple[int, Selection, str]] = []
        requests: list[Request] = []
        for index, check in enumerate(checks):
            if not isinstance(check, CheckBody):
                results.append(check)
                continue
            try:
                selection, request = self._check_handler.build_request(caller, check)
            except LimitforgeError as error:
                results.append(self._problem(caller, error))
                continue
            results.append(None)
            valid.append((index, selection, check.subject))
            requests.append(request)
        decisions = await self._limiter.check_many(requests)
        for (index, selection, subject), decision in zip(valid, decisions, strict=True):
            results[index] = self._result(caller, selection, subject, decision)
        return results

    def _result(
        self, caller: Caller, selection: Selection, subject: str, decision: Decision | LimitforgeError
    ) -> DecisionBody | ProblemMembers:
        if not isinstance(decision, Decision):
            return self._problem(caller, decision)
        self._check_handler.count_decision(caller, subject, decision)
        return decision_body(decision, selection, *self._check_handler.seal_ids(caller, decision))

    def _problem(self, caller: Caller, error: LimitforgeError, size: int = 0) -> ProblemMembers:
        """Return the problem document of one check, and charge the caller if the check was invalid."""
        if isinstance(error, InvalidInput):
            self._check_handler.invalid_bodies.charge(caller.key.id, max(size, INVALID_CHECK_BYTES))
        return problem_from_error(error).members
