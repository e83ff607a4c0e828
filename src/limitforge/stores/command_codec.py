"""Everything other than a check, as flows of calls: leases, reservations, resets, overrides."""

import json
from typing import Any, cast

from limitforge.core.calendar import Calendar, Period
from limitforge.core.keys import Keys, decoded, encoded, own_of
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
from limitforge.core.tickets import NOTHING, Reservation
from limitforge.errors import InvalidInput, StoreCorrupt, UnknownReservation
from limitforge.stores.codec import OWN_TIME, Call, Flow, Reply, T, answer_to, call_of, not_ours
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropDenials,
    GetOverrides,
    ListOverrides,
    MissingOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
)
from limitforge.stores.slots import SlotOf, by_slot

_CLEARED = 500
_NOT_OURS = -1
_CHECKED = 250  # overrides of one call: it keeps Redis busy for about half a millisecond

SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = range(2, 10)
MISSING_OVERRIDES = 13


def command_flow(command: Command[T], keys: Keys, slot_of: SlotOf, around_us: int, time_us: int) -> Flow[T]:
    """Anything other than a check. All keys of one call are in one slot."""
    flow: Flow[Any]
    match command:
        case Release():
            flow = _lease(RELEASE, command, slot_of, time_us)
        case Renew():
            flow = _lease(RENEW, command, slot_of, time_us)
        case Settle():
            flow = _settle(command, slot_of, around_us, time_us)
        case Reset():
            flow = _reset(command, slot_of)
        case SetOverride():
            flow = _set_override(command, keys, time_us)
        case GetOverrides():
            flow = _get_overrides(command.own, command.tenant, [encoded(command.subject)], keys, time_us)
        case ListOverrides():
            flow = _list_overrides(command, keys, time_us)
        case MissingOverrides():
            flow = _missing_overrides(command, keys, slot_of, time_us)
        case DeleteOverride():
            flow = _delete_override(command, keys, time_us)
        case ClearOverrides():
            flow = _clear_overrides(command, keys, time_us)
        case DropDenials():
            flow = _nothing()
        case _:
            raise NotImplementedError(type(command))
    return cast("Flow[T]", flow)


def _lease(operation: int, command: Release | Renew, slot_of: SlotOf, time_us: int) -> Flow[bool]:
    held = True
    for keys in by_slot(command.lease.keys, slot_of):
        call = call_of((operation, time_us), keys, [command.lease.token])
        values = answer_to(call, (yield call))
        _ours(values, "a bucket of the lease")
        held = held and values[0] == 1
    return held


def _settle(command: Settle, slot_of: SlotOf, around_us: int, time_us: int) -> Flow[Settlement]:
    """Slot by slot where a reservation holds several: each part is settled once, however often this is called."""
    reservation = command.reservation
    if reservation.token == NOTHING:  # it was let pass without the store
        return Settlement(Settled.SETTLED, command.cost)
    answers: list[Settlement] = []
    wanted = list(zip(reservation.limits, command.amounts, strict=True))
    for part in by_slot(wanted, lambda one: slot_of(one[0].key)) or [[]]:
        limits, amounts = [limit for limit, _ in part], tuple(amount for _, amount in part)
        record = reservation.record
        if limits and slot_of(record) != slot_of(limits[0].key):
            record = encoded(Keys.reservation(own_of(decoded(limits[0].key)), reservation.token))
        held = Reservation(reservation.token, record, limits)
        answers.append((yield from _settle_part(Settle(held, command.cost, amounts), around_us, time_us)))
    return next((answer for answer in answers if answer.outcome is Settled.LAPSED), answers[0])


def _settle_part(command: Settle, around_us: int, time_us: int) -> Flow[Settlement]:
    reservation = command.reservation
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


def _reset(command: Reset, slot_of: SlotOf) -> Flow[None]:
    for keys in by_slot(command.keys, slot_of):
        call = call_of((RESET, OWN_TIME), keys)
        answer_to(call, (yield call))


def _set_override(command: SetOverride, keys: Keys, time_us: int) -> Flow[Override]:
    compiled = [value for one in command.compiled for value in (one.name, one.code, len(one.numbers), *one.numbers)]
    call = call_of(
        (SET_OVERRIDE, time_us, command.ttl_us, compiled, MAX_PER_SUBJECT),
        [keys.overrides(command.own, command.subject), keys.override_index(command.own)],
        [command.subject, command.resource, json.dumps(command.changes)],
    )
    values = answer_to(call, (yield call))
    _ours(values, "the subject's overrides")
    if values[0] != 1:
        too_many(MAX_PER_SUBJECT + 1)
    return Override(command.tenant, command.resource, command.subject, command.changes, expires_at(values[1]))


def _get_overrides(own: str, tenant: str, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[list[Override]]:
    if not subjects:
        return []
    call = call_of((GET_OVERRIDES, time_us), _index_and_overrides(own, subjects, keys), subjects)
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


def _subjects(own: str, keys: Keys, after: bytes | None, count: int, time_us: int) -> Flow[list[bytes]]:
    start = b"-" if after is None else b"(" + after
    call = call_of((LIST_OVERRIDES, time_us, count), [keys.override_index(own)], [start])
    _, subjects = _with_strings(call, (yield call), "the index of overrides")
    return subjects


def _list_overrides(command: ListOverrides, keys: Keys, time_us: int) -> Flow[OverridePage]:
    """The first of each lane, and of those the first of all."""
    after = subject_after(command.cursor)
    found: list[tuple[bytes, str]] = []
    for own in command.lanes:
        subjects = yield from _subjects(own, keys, after, command.subjects + 1, time_us)
        found += [(subject, own) for subject in subjects]
    found.sort()
    page, more = found[: command.subjects], len(found) > command.subjects
    overrides: dict[str, list[Override]] = {}
    for own in dict.fromkeys(own for _, own in page):
        here = [subject for subject, lane in page if lane == own]
        for override in (yield from _get_overrides(own, command.tenant, here, keys, time_us)):
            overrides.setdefault(override.subject, []).append(override)
    return OverridePage(
        [override for subject, _ in page for override in overrides.get(decoded(subject), ())],
        cursor_after(page[-1][0]) if more else None,
    )


def _missing_overrides(command: MissingOverrides, keys: Keys, slot_of: SlotOf, time_us: int) -> Flow[list[int]]:
    missing: list[int] = []
    for positions in by_slot(range(len(command.places)), lambda at: slot_of(command.places[at][0])):
        for start in range(0, len(positions), _CHECKED):
            some = positions[start : start + _CHECKED]
            names, arguments = [], []
            for own, resource, subject in (command.places[at] for at in some):
                names += [keys.overrides(own, subject), keys.override_index(own)]
                arguments += [subject, resource]
            call = call_of((MISSING_OVERRIDES, time_us), names, arguments)
            missing += [some[at - 1] for at in answer_to(call, (yield call))[1:]]
    return sorted(missing)


def _delete(own: str, resource: str | None, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[int]:
    call = call_of(
        (DELETE_OVERRIDES, time_us, int(resource is None)),
        _index_and_overrides(own, subjects, keys),
        [resource or "", *subjects],
    )
    values = answer_to(call, (yield call))
    _ours(values, "the subject's overrides")
    return values[1]


def _delete_override(command: DeleteOverride, keys: Keys, time_us: int) -> Flow[bool]:
    return bool((yield from _delete(command.own, command.resource, [encoded(command.subject)], keys, time_us)))


def _clear_overrides(command: ClearOverrides, keys: Keys, time_us: int) -> Flow[int]:
    cleared = 0
    for own in command.lanes:
        while subjects := (yield from _subjects(own, keys, None, _CLEARED, time_us)):
            cleared += yield from _delete(own, None, subjects, keys, time_us)
    return cleared


def _index_and_overrides(own: str, subjects: list[bytes], keys: Keys) -> list[str]:
    return [keys.override_index(own), *(keys.overrides(own, decoded(s)) for s in subjects)]


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
