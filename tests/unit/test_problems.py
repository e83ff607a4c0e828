"""The HTTP status, code and Retry-After of each error."""

import pytest

from limitforge.errors import (
    CatalogUnavailable,
    Conflict,
    Forbidden,
    InvalidInput,
    LimitforgeError,
    NotFound,
    StoreUnavailable,
    TooManyReservations,
    TooManyUnknownKeys,
    UnknownKey,
    UnknownReservation,
    VersionConflict,
)
from limitforge.service.problems import HttpError, problem_from_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidInput("cost", "must be a number"), 422, "invalid_field"),
        (UnknownKey("unknown key"), 401, "unknown_key"),
        (TooManyUnknownKeys("wait", 1), 429, "too_many_unknown_keys"),
        (Forbidden("no"), 403, "forbidden"),
        (NotFound("no"), 404, "not_found"),
        (UnknownReservation("no"), 404, "unknown_reservation"),
        (VersionConflict("no"), 412, "outdated"),
        (Conflict("no"), 409, "conflict"),
        (TooManyReservations("no"), 409, "too_many_reservations"),
        (CatalogUnavailable("no"), 503, "catalog_unavailable"),
        (StoreUnavailable("no"), 503, "store_unavailable"),
        (HttpError(413, "body_too_large", "at most 5 bytes"), 413, "body_too_large"),
        (LimitforgeError("a path of this machine"), 500, "internal_error"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else None,
)
def test_each_error_has_its_status_and_code(error: LimitforgeError, status: int, code: str) -> None:
    problem = problem_from_error(error)
    members = problem.members
    assert (problem.status, members["status"], members["code"]) == (status, status, code)
    assert members["type"] == f"urn:limitforge:problem:{code.replace('_', '-')}"
    assert (members["detail"] == str(error)) == (status != 500)
    assert members.get("field") == ("cost" if status == 422 else None)
    headers = dict(problem.headers)
    assert (b"www-authenticate" in headers) == (status == 401)
    assert (b"retry-after" in headers) == (status in (429, 503))


@pytest.mark.parametrize(("retry_after_ms", "seconds"), [(1, b"1"), (1_000, b"1"), (1_001, b"2"), (59_500, b"60")])
def test_retry_after_is_never_too_early(retry_after_ms: int, seconds: bytes) -> None:
    assert dict(problem_from_error(TooManyUnknownKeys("wait", retry_after_ms)).headers)[b"retry-after"] == seconds
