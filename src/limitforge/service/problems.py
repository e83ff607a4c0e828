"""What goes wrong, as HTTP says it: one table from errors to statuses, and RFC 9457 problem documents."""

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
"""The registered type of a denial (draft-ietf-httpapi-ratelimit-headers)."""


class HttpError(LimitforgeError):
    """The request itself can't be read: its status, and the code of its problem."""

    def __init__(self, status: int, code: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = headers


class ProblemKind(msgspec.Struct, frozen=True):
    """How one kind of error is told."""

    status: int
    code: str
    title: str


# From the special to the general: the first that fits is told.
ERROR_KINDS: tuple[tuple[type[LimitforgeError], ProblemKind], ...] = (
    (InvalidInput, ProblemKind(422, "invalid_field", "A field makes no sense")),
    (UnknownKey, ProblemKind(401, "unknown_key", "The key is missing, wrong or no longer good")),
    (TooManyUnknownKeys, ProblemKind(429, "too_many_unknown_keys", "Too many unknown keys")),
    (Forbidden, ProblemKind(403, "forbidden", "The key may not do this")),
    (NotFound, ProblemKind(404, "not_found", "There is no such thing")),
    (UnknownReservation, ProblemKind(404, "unknown_reservation", "There is no such reservation")),
    (VersionConflict, ProblemKind(412, "outdated", "Somebody else has changed it")),
    (Conflict, ProblemKind(409, "conflict", "It contradicts what is there")),
    (TooManyReservations, ProblemKind(409, "too_many_reservations", "Too many open reservations")),
    (CatalogUnavailable, ProblemKind(503, "catalog_unavailable", "The configuration can't be read now")),
    (StoreUnavailable, ProblemKind(503, "store_unavailable", "The store can't be reached now")),
)
HTTP_ERROR_TITLES: dict[str, str] = {
    "malformed_json": "The body is no JSON",
    "malformed_request": "The request can't be read",
    "head_too_large": "The header fields are too large",
    "too_slow": "The request took too long to arrive",
    "body_too_large": "The body is too large",
    "not_json": "The body must be JSON",
    "method_not_allowed": "The method is not for this path",
    "unknown_path": "There is nothing at this path",
    "idempotency_key_reused": "The idempotency key was used for something else",
    "rate_limit_exceeded": "Too many calls",
    "too_many_batches": "Too many batches at once",
    "too_many_refusals": "Too many invalid requests",
    "overloaded": "The service receives too much now",
}
INTERNAL_ERROR = ProblemKind(500, "internal_error", "Something is wrong with limitforge itself")


class Problem(msgspec.Struct, frozen=True):
    """An error as it is answered."""

    status: int
    members: dict[str, Any]
    headers: list[tuple[bytes, bytes]]

    def body(self) -> bytes:
        return msgspec.json.encode(self.members)


def problem_type(code: str) -> str:
    """The stable type of a problem."""
    if code == "rate_limit_exceeded":
        return QUOTA_EXCEEDED
    return f"urn:limitforge:problem:{code.replace('_', '-')}"


def problem_from_error(error: LimitforgeError) -> Problem:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        kind = ProblemKind(error.status, error.code, HTTP_ERROR_TITLES[error.code])
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    else:
        kind = next((kind for known, kind in ERROR_KINDS if isinstance(error, known)), INTERNAL_ERROR)
    detail = str(error) if kind is not INTERNAL_ERROR else "it was logged; please report it"
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
