"""Everything other than a check, as flows of calls: leases, reservations, resets, overrides."""

import json
from typing import Any, cast

from limitforge.core.calendar import Calendar, Period
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
from limitforge.core.reservations import Settled, Settlement
from limitforge.core.tickets import NOTHING
from limitforge.errors import InvalidInput, StoreCorrupt, UnknownReservation
from limitforge.stores.codec import OWN_TIME, Call, Flow, Reply, T, answer_to, call_of, not_ours
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropDenials,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
)

_CLEARED = 500
_NOT_OURS = -1

SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = range(2, 10)


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
        case DropDenials():
            flow = _nothing()
        case _:
            raise NotImplementedError(type(command))
    return cast("Flow[T]", flow)


def _lease(operation: int, command: Release | Renew, time_us: int) -> Flow[bool]:
    if not command.lease.keys:
        return True
    call = call_of((operation, time_us), command.lease.keys, [command.lease.token])
    values = answer_to(call, (yield call))
    _ours(values, "a bucket of the lease")
    return values[0] == 1


def _settle(command: Settle, around_us: int, time_us: int) -> Flow[Settlement]:
    reservation = command.reservation
    if reservation.token == NOTHING:  # it was let pass without the store
        return Settlement(Settled.SETTLED, command.cost)
    calendars = [Calendar(Period(c[0]), c[1], c[2]) if (c := limit.calendar) else None for limit in reservation.limits]
    windows: list[tuple[int, ...]] = [calendar.around(around_us) if calendar else () for calendar in calendars]
    for _ in range(2 + 2 * len(windows)):
        request = (SETTLE, time_us, command.cost, command.amounts, windows)
        keys = [reservation.record, *(limit.key for limit in reservation.limits)]
        call = call_of(request, keys, [reservation.token])
        values = answer_to(call, (yield call))
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


def _nothing() -> Flow[None]:
    """Redis keeps no denials: the shells drop theirs, and tell the others."""
    yield from ()


def _reset(command: Reset) -> Flow[None]:
    if command.keys:
        call = call_of((RESET, OWN_TIME), command.keys)
        answer_to(call, (yield call))


def _set_override(command: SetOverride, keys: Keys, time_us: int) -> Flow[Override]:
    compiled = [value for one in command.compiled for value in (one.name, one.code, len(one.numbers), *one.numbers)]
    call = call_of(
        (SET_OVERRIDE, time_us, command.ttl_us, compiled, MAX_PER_SUBJECT),
        [keys.overrides(command.tenant_key, command.subject), keys.override_index(command.tenant_key)],
        [command.subject, command.resource, json.dumps(command.changes)],
    )
    values = answer_to(call, (yield call))
    _ours(values, "the subject's overrides")
    if values[0] != 1:
        too_many(MAX_PER_SUBJECT + 1)
    return Override(command.tenant, command.resource, command.subject, command.changes, expires_at(values[1]))


def _get_overrides(
    tenant_key: str, tenant: str, subjects: list[bytes], keys: Keys, time_us: int
) -> Flow[list[Override]]:
    if not subjects:
        return []
    call = call_of((GET_OVERRIDES, time_us), _index_and_overrides(tenant_key, subjects, keys), subjects)
    told, texts = _with_strings(call, (yield call), "a subject's overrides")
    values, strings = iter(told[1:]), iter(texts)
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
    call = call_of((LIST_OVERRIDES, time_us, count), [keys.override_index(tenant_key)], [start])
    _, subjects = _with_strings(call, (yield call), "the index of overrides")
    return subjects


def _list_overrides(command: ListOverrides, keys: Keys, time_us: int) -> Flow[OverridePage]:
    after = subject_after(command.cursor)
    subjects = yield from _subjects(command.tenant_key, keys, after, command.subjects + 1, time_us)
    page = subjects[: command.subjects]
    overrides = yield from _get_overrides(command.tenant_key, command.tenant, page, keys, time_us)
    return OverridePage(overrides, cursor_after(page[-1]) if len(subjects) > len(page) else None)


def _delete(tenant_key: str, resource: str | None, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[int]:
    call = call_of(
        (DELETE_OVERRIDES, time_us, int(resource is None)),
        _index_and_overrides(tenant_key, subjects, keys),
        [resource or "", *subjects],
    )
    values = answer_to(call, (yield call))
    _ours(values, "the subject's overrides")
    return values[1]


def _delete_override(command: DeleteOverride, keys: Keys, time_us: int) -> Flow[bool]:
    return bool((yield from _delete(command.tenant_key, command.resource, [encoded(command.subject)], keys, time_us)))


def _clear_overrides(command: ClearOverrides, keys: Keys, time_us: int) -> Flow[int]:
    cleared = 0
    while subjects := (yield from _subjects(command.tenant_key, keys, None, _CLEARED, time_us)):
        cleared += yield from _delete(command.tenant_key, None, subjects, keys, time_us)
    return cleared


def _index_and_overrides(tenant_key: str, subjects: list[bytes], keys: Keys) -> list[str]:
    return [keys.override_index(tenant_key), *(keys.overrides(tenant_key, decoded(s)) for s in subjects)]


def _with_strings(call: Call, reply: Reply, what: str) -> tuple[list[int], list[bytes]]:
    """An answer that comes with strings; one without says that a key is not ours."""
    match reply:
        case [told, [*strings]]:
            return answer_to(call, told), strings
    answer_to(call, reply)
    raise not_ours(what)


def _ours(values: list[int], what: str) -> None:
    if values[0] == _NOT_OURS:
        raise not_ours(what)
