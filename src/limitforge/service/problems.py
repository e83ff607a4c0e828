"""Translate errors to HTTP: one table of statuses and codes, and RFC 9457 problem documents."""

from typing import Any

import msgspec

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

PROBLEM_JSON = b"application/problem+json"
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The registered problem type of a denial (draft-ietf-httpapi-ratelimit-headers)."""


class HttpError(LimitforgeError):
    """A request that fails with this HTTP status. `code` is a key of `HTTP_ERROR_TITLES`, `headers` are sent as is."""

    def __init__(self, status: int, code: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = headers


class ProblemKind(msgspec.Struct, frozen=True):
    """The status, code and title of one kind of error."""

    status: int
    code: str
    title: str


# The first entry whose class matches applies, so a subclass must come before its base class.
ERROR_KINDS: tuple[tuple[type[LimitforgeError], ProblemKind], ...] = (
    (InvalidInput, ProblemKind(422, "invalid_field", "Invalid field")),
    (UnknownKey, ProblemKind(401, "unknown_key", "The key is missing, unknown, expired or revoked")),
    (TooManyUnknownKeys, ProblemKind(429, "too_many_unknown_keys", "Too many requests with unknown keys")),
    (Forbidden, ProblemKind(403, "forbidden", "The key does not permit this")),
    (NotFound, ProblemKind(404, "not_found", "Not found")),
    (UnknownReservation, ProblemKind(404, "unknown_reservation", "Unknown reservation")),
    (VersionConflict, ProblemKind(412, "outdated", "Changed by another request in the meantime")),
    (Conflict, ProblemKind(409, "conflict", "Conflicts with the current state")),
    (TooManyReservations, ProblemKind(409, "too_many_reservations", "Too many open reservations")),
    (CatalogUnavailable, ProblemKind(503, "catalog_unavailable", "The configuration database is unavailable")),
    (StoreUnavailable, ProblemKind(503, "store_unavailable", "The store is unavailable")),
)
HTTP_ERROR_TITLES: dict[str, str] = {
    "malformed_json": "The body is not valid JSON",
    "malformed_request": "Malformed HTTP request",
    "head_too_large": "The header fields are too large",
    "too_slow": "The request took too long to arrive",
    "body_too_large": "The body is too large",
    "not_json": "The content type must be JSON",
    "method_not_allowed": "Method not allowed",
    "unknown_path": "Unknown path",
    "idempotency_key_reused": "The idempotency key was used with a different request",
    "rate_limit_exceeded": "Too many requests",
    "too_many_batches": "Too many concurrent batches",
    "too_many_refusals": "Too many invalid requests",
    "overloaded": "The service is overloaded",
}
NOTHING_AT_PATH = "there is nothing at this path"
"""The detail of an `unknown_path`."""
INTERNAL_ERROR = ProblemKind(500, "internal_error", "Internal error")


class Problem(msgspec.Struct, frozen=True):
    """A problem document with its status and header fields."""

    status: int
    members: dict[str, Any]
    headers: list[tuple[bytes, bytes]]

    def body(self) -> bytes:
        return msgspec.json.encode(self.members)


def problem_type(code: str) -> str:
    """Return the stable `type` of a problem document."""
    if code == "rate_limit_exceeded":
        return QUOTA_EXCEEDED
    return f"urn:limitforge:problem:{code.replace('_', '-')}"


def problem_from_error(error: LimitforgeError) -> Problem:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        kind = ProblemKind(error.status, error.code, HTTP_ERROR_TITLES[error.code])
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    else:
        kind = next((kind for error_type, kind in ERROR_KINDS if isinstance(error, error_type)), INTERNAL_ERROR)
    detail = str(error) if kind is not INTERNAL_ERROR else "this is a bug in limitforge; the service log has details"
    members = {
        "type": problem_type(kind.code),
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "code": kind.code,
    }
    if isinstance(error, InvalidInput):
        members["field"] = error.field
    if kind.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="limitforge"'))
    if isinstance(error, TooManyUnknownKeys):
        headers.append((b"retry-after", b"%d" % max(-(-error.retry_after_ms // 1_000), 1)))
    elif kind.status == 503:
        headers.append((b"retry-after", b"1"))
    return Problem(kind.status, members, headers)
