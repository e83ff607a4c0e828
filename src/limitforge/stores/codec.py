"""What goes to the script and what comes back, without any I/O.

Each request is a flow: a generator that yields calls, is sent their replies, and returns the answer. The shells
(`redis.py`, `redis_sync.py`) only carry calls, so they share everything else.
"""

import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from limitforge.core.calendar import Calendar, Period
from limitforge.core.check import Check
from limitforge.core.decide import too_many_reservations
from limitforge.core.decision import Decision, Outcome, decision_of
from limitforge.core.keys import Keys, decoded, encoded
from limitforge.core.overrides import (
    MAX_PER_SUBJECT,
    Override,
    OverridePage,
    cursor_after,
    expires_at,
    subject_after,
    too_many,
)
from limitforge.core.plan import Rule
from limitforge.core.reservations import Settled, Settlement
from limitforge.errors import InvalidInput, LimitforgeError, StoreCorrupt, UnknownReservation
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
)

MAX_CHECKS = 100  # of one call, so that Redis is never busy for over a millisecond or so
MAX_KEYS = 1_000
_CLEARED = 500

CHECK, SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = range(1, 10)
DENIED, ALLOWED, AGAIN, CORRUPT, TOO_MANY = range(5)
NOT_OURS = -1
OWN_TIME = -1  # in place of a time: let Redis read its clock

T = TypeVar("T")


class Call(NamedTuple):
    """KEYS and ARGV of one call of the script."""

    keys: list[bytes]
    args: list[bytes]


Reply = bytes | list[Any]
Flow = Generator[Call, Reply, T]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


def check_flow(checks: Sequence[Check], around_us: int, time_us: int) -> Flow[list[Decision | LimitforgeError]]:
    """Judge checks in order. Calendars are laid around `around_us`, the caller's time; `time_us` replaces Redis's own
    unless it is OWN_TIME.
    """
    answers: list[Decision | LimitforgeError] = []
    for part in _split(checks):
        groups = [group for check in part for group in (check, check.shadow) if group is not None]
        for group in groups:
            if group.varies:
                group.around(around_us)
        judged = iter((yield from _judge(groups, time_us)))
        for check in part:
            now_us, outcome = next(judged)
            _, shadow = next(judged) if check.shadow is not None else (0, None)
            if isinstance(outcome, LimitforgeError):
                answers.append(outcome)
            else:
                # A candidate plan must never harm the live one: what is wrong with its buckets only leaves it out.
                answers.append(
                    decision_of(check, now_us, outcome, None if isinstance(shadow, LimitforgeError) else shadow)
                )
    return answers


def _judge(groups: Sequence[Check], time_us: int) -> Flow[list[tuple[int, Outcome | LimitforgeError]]]:
    """Judge groups of limits in order, each with the store's time.

    The script stops at one whose calendar does not reach that time, since the rest must see what it takes: it and they
    are asked once more.
    """
    outcomes: list[tuple[int, Outcome | LimitforgeError]] = []
    asks = 2 + 2 * sum(len(group.takes) for group in groups)
    while len(outcomes) < len(groups):
        asked = groups[len(outcomes) :]
        if asks == 0:
            return outcomes + [(0, StoreCorrupt("no calendar window holds the time of its bucket"))] * len(asked)
        asks -= 1
        call = encode_checks(asked, time_us)
        values = _decode(cast("bytes", (yield call)))
        place = 1
        for check in asked:
            outcome, place = _read_outcome(check, call, values, place)
            if outcome is None:
                break
            outcomes.append((values[0], outcome))
    return outcomes


def encode_checks(checks: Sequence[Check], time_us: int) -> Call:
    """Every key, rule and string once, however many checks use it."""
    keys: dict[str, int] = {}
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}
    flat: list[int] = []
    for check in checks:
        hold = check.hold
        flat += (len(check.takes), _index(strings, check.lease, 2) if check.lease else 0)
        if hold is None:
            flat.append(0)
        else:
            flat += (_index(keys, hold.key, 1), _index(strings, hold.token, 2), hold.ttl_us, int(hold.refund))
        for rule, key, cost, resource, subject in check.takes:
            flat += (_index(rules, rule, 1), _index(keys, key, 1), cost)
            if subject is None:
                flat += (0, 0)
            else:
                flat += (_index(keys, Keys.overrides(check.tenant, subject), 1), _index(strings, resource, 2))
    blob = _encode((CHECK, time_us, [rule.row for rule in rules], flat))
    return Call([encoded(key) for key in keys], [blob, *(s if isinstance(s, bytes) else encoded(s) for s in strings)])


def _index(table: dict[Any, int], item: Any, first: int) -> int:
    """The place of an item in a list that Lua reads from 1; ARGV's strings come after the blob."""
    at = table.get(item)
    if at is None:
        at = table[item] = len(table) + first
    return at


def _read_outcome(
    check: Check, call: Call, values: list[int], place: int
) -> tuple[Outcome | LimitforgeError | None, int]:
    """The outcome at `place` of the reply and the place after it; None if the check must be asked again, which it then
    is ready for.
    """
    status = values[place]
    if status == AGAIN:
        check.around_one(values[place + 1], values[place + 2])
        return None, place + 3
    if status == CORRUPT:
        return _corrupt(check, call.keys[values[place + 1] - 1]), place + 2
    if status == TOO_MANY:
        return too_many_reservations(check.takes[values[place + 1]][0]), place + 2
    end = place + 2 + 5 * len(check.takes)
    rows = [cast("Any", tuple(values[at : at + 5])) for at in range(place + 2, end, 5)]
    return Outcome(status == ALLOWED, values[place + 1], rows), end


def _corrupt(check: Check, key: bytes) -> StoreCorrupt:
    """Names the limit, not the key: a key holds the subject, and errors are logged."""
    name = next((rule.limit.name for rule, own, *_ in check.takes if encoded(own) == key), None)
    what = f"the bucket of limit {name!r}" if name else "the subject's overrides"
    return _not_ours(what)


def _split(checks: Sequence[Check]) -> Iterable[list[Check]]:
    """Parts that one call can take, in order."""
    part: list[Check] = []
    keys = 0
    for check in checks:
        more = 2 * len(check.takes) + 1 + (2 * len(check.shadow.takes) if check.shadow else 0)
        if part and (len(part) >= MAX_CHECKS or keys + more > MAX_KEYS):
            yield part
            part, keys = [], 0
        part.append(check)
        keys += more
    if part:
        yield part


def command_flow(command: Command[T], keys: Keys, around_us: int, time_us: int) -> Flow[T]:
    """Anything other than a check."""
    flow: Flow[Any]
    match command:
        case Release():
            flow = _lease(RELEASE, command, time_us)
        case Renew():
            flow = _lease(RENEW, command, time_us)
        case Settle():
            flow = _settle(command, around_us, time_us)
        case Reset():
            flow = _reset(command)
        case SetOverride():
            flow = _set_override(command, keys, time_us)
        case GetOverrides():
            flow = _get_overrides(command.tenant_key, command.tenant, [encoded(command.subject)], keys, time_us)
        case ListOverrides():
            flow = _list_overrides(command, keys, time_us)
        case DeleteOverride():
            flow = _delete_override(command, keys, time_us)
        case ClearOverrides():
            flow = _clear_overrides(command, keys, time_us)
        case _:
            raise NotImplementedError(type(command))
    return cast("Flow[T]", flow)


def _lease(operation: int, command: Release | Renew, time_us: int) -> Flow[bool]:
    if not command.lease.keys:
        return True
    values = _decode(
        cast("bytes", (yield Call(command.lease.keys, [_encode((operation, time_us)), command.lease.token])))
    )
    _ours(values, "a bucket of the lease")
    return values[0] == 1


def _settle(command: Settle, around_us: int, time_us: int) -> Flow[Settlement]:
    reservation = command.reservation
    calendars = [Calendar(Period(c[0]), c[1], c[2]) if (c := limit.calendar) else None for limit in reservation.limits]
    windows: list[tuple[int, ...]] = [calendar.around(around_us) if calendar else () for calendar in calendars]
    for _ in range(2 + 2 * len(windows)):
        blob = _encode((SETTLE, time_us, command.cost, command.amounts, windows))
        call = Call([reservation.record, *(limit.key for limit in reservation.limits)], [blob, reservation.token])
        values = _decode(cast("bytes", (yield call)))
        _ours(values, "the reservation or one of its buckets")
        match values:
            case [1, cost]:
                return Settlement(Settled.SETTLED, cost)
            case [2]:
                return Settlement(Settled.LAPSED, 0)
            case [4, at, now_us]:
                windows[at] = cast("Calendar", calendars[at]).around(now_us)
            case [5]:
                raise InvalidInput("reservation_id", "names other limits than were reserved")
            case _:
                raise UnknownReservation("no such reservation, or its result was forgotten a day after its end")
    raise StoreCorrupt("no calendar window holds the time of its bucket")


def _reset(command: Reset) -> Flow[None]:
    if command.keys:
        yield Call([encoded(key) for key in command.keys], [_encode((RESET, OWN_TIME))])


def _set_override(command: SetOverride, keys: Keys, time_us: int) -> Flow[Override]:
    compiled = [value for one in command.compiled for value in (one.name, one.code, len(one.numbers), *one.numbers)]
    call = Call(
        [
            encoded(keys.overrides(command.tenant_key, command.subject)),
            encoded(keys.override_index(command.tenant_key)),
        ],
        [
            _encode((SET_OVERRIDE, time_us, command.ttl_us, compiled, MAX_PER_SUBJECT)),
            encoded(command.subject),
            encoded(command.resource),
            json.dumps(command.changes).encode(),
        ],
    )
    values = _decode(cast("bytes", (yield call)))
    _ours(values, "the subject's overrides")
    if values[0] != 1:
        too_many(MAX_PER_SUBJECT + 1)
    return Override(command.tenant, command.resource, command.subject, command.changes, expires_at(values[1]))


def _get_overrides(
    tenant_key: str, tenant: str, subjects: list[bytes], keys: Keys, time_us: int
) -> Flow[list[Override]]:
    if not subjects:
        return []
    call = Call(
        [
            encoded(keys.override_index(tenant_key)),
            *(encoded(keys.overrides(tenant_key, decoded(s))) for s in subjects),
        ],
        [_encode((GET_OVERRIDES, time_us)), *subjects],
    )
    reply = yield call
    if isinstance(reply, bytes):
        raise _not_ours("a subject's overrides")
    values, strings = iter(_decode(reply[0])[1:]), iter(reply[1])
    found = []
    for subject in subjects:
        live = [
            Override(
                tenant, decoded(next(strings)), decoded(subject), json.loads(next(strings)), expires_at(next(values))
            )
            for _ in range(next(values))
        ]
        found += sorted(live, key=lambda override: encoded(override.resource))
    return found


def _subjects(tenant_key: str, keys: Keys, after: bytes | None, count: int, time_us: int) -> Flow[list[bytes]]:
    start = b"-" if after is None else b"(" + after
    reply = yield Call([encoded(keys.override_index(tenant_key))], [_encode((LIST_OVERRIDES, time_us, count)), start])
    if isinstance(reply, bytes):
        raise _not_ours("the index of overrides")
    return cast("list[bytes]", reply[1])


def _list_overrides(command: ListOverrides, keys: Keys, time_us: int) -> Flow[OverridePage]:
    after = subject_after(command.cursor)
    subjects = yield from _subjects(command.tenant_key, keys, after, command.subjects + 1, time_us)
    page = subjects[: command.subjects]
    overrides = yield from _get_overrides(command.tenant_key, command.tenant, page, keys, time_us)
    return OverridePage(overrides, cursor_after(page[-1]) if len(subjects) > len(page) else None)


def _delete(tenant_key: str, resource: str | None, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[int]:
    call = Call(
        [
            encoded(keys.override_index(tenant_key)),
            *(encoded(keys.overrides(tenant_key, decoded(s))) for s in subjects),
        ],
        [_encode((DELETE_OVERRIDES, time_us, int(resource is None))), encoded(resource or ""), *subjects],
    )
    values = _decode(cast("bytes", (yield call)))
    _ours(values, "the subject's overrides")
    return values[1]


def _delete_override(command: DeleteOverride, keys: Keys, time_us: int) -> Flow[bool]:
    return bool((yield from _delete(command.tenant_key, command.resource, [encoded(command.subject)], keys, time_us)))


def _clear_overrides(command: ClearOverrides, keys: Keys, time_us: int) -> Flow[int]:
    cleared = 0
    while subjects := (yield from _subjects(command.tenant_key, keys, None, _CLEARED, time_us)):
        cleared += yield from _delete(command.tenant_key, None, subjects, keys, time_us)
    return cleared


def _ours(values: list[int], what: str) -> None:
    if values[0] == NOT_OURS:
        raise _not_ours(what)


def _not_ours(what: str) -> StoreCorrupt:
    return StoreCorrupt(f"{what} holds a value that limitforge did not write; see who else uses this key prefix")
