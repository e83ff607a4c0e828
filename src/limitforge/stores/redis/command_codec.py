"""Everything other than a check, as flows of calls: leases, reservations, resets, overrides."""

import json
from typing import Any, cast

from limitforge.core.calendar import Calendar, Period
from limitforge.core.handles import EMPTY_TOKEN, Reservation
from limitforge.core.keys import Keys, decode_key, encode_key, lane_prefix_of
from limitforge.core.overrides import (
    MAX_PER_SUBJECT,
    Override,
    OverridePage,
    decode_cursor,
    encode_cursor,
    expiry_seconds,
    require_room_for_override,
)
from limitforge.core.reservations import Settlement, SettlementOutcome
from limitforge.errors import InvalidInput, StoreCorrupt, UnknownReservation
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropCachedDenials,
    FindMissingOverrides,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
)
from limitforge.stores.redis.codec import (
    SERVER_TIME,
    Flow,
    Reply,
    ScriptCall,
    T,
    decode_reply,
    foreign_value_error,
    make_call,
)
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot

_CLEAR_BATCH = 500
_FOREIGN_VALUE = -1
_FIND_MISSING_BATCH = 250  # overrides of one call: it keeps Redis busy for about half a millisecond

SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = range(2, 10)
FIND_MISSING_OVERRIDES = 13


def command_flow(command: Command[T], keys: Keys, slot_of: SlotOf, calendar_us: int, time_us: int) -> Flow[T]:
    """Anything other than a check. All keys of one call are in one slot."""
    flow: Flow[Any]
    match command:
        case Release():
            flow = _lease(RELEASE, command, slot_of, time_us)
        case Renew():
            flow = _lease(RENEW, command, slot_of, time_us)
        case Settle():
            flow = _settle(command, slot_of, calendar_us, time_us)
        case Reset():
            flow = _reset(command, slot_of)
        case SetOverride():
            flow = _set_override(command, keys, time_us)
        case GetOverrides():
            flow = _get_overrides(command.lane_prefix, command.tenant, [encode_key(command.subject)], keys, time_us)
        case ListOverrides():
            flow = _list_overrides(command, keys, time_us)
        case FindMissingOverrides():
            flow = _find_missing_overrides(command, keys, slot_of, time_us)
        case DeleteOverride():
            flow = _delete_override(command, keys, time_us)
        case ClearOverrides():
            flow = _clear_overrides(command, keys, time_us)
        case DropCachedDenials():
            flow = _no_calls()
        case _:
            raise NotImplementedError(type(command))
    return cast("Flow[T]", flow)


def _lease(operation: int, command: Release | Renew, slot_of: SlotOf, time_us: int) -> Flow[bool]:
    held = True
    for keys in group_by_slot(command.lease.keys, slot_of):
        call = make_call((operation, time_us), keys, [command.lease.token])
        values = decode_reply(call, (yield call))
        _require_own_format(values, "a bucket of the lease")
        held = held and values[0] == 1
    return held


def _settle(command: Settle, slot_of: SlotOf, around_us: int, time_us: int) -> Flow[Settlement]:
    """Slot by slot where a reservation holds several: each part is settled once, however often this is called."""
    reservation = command.reservation
    if reservation.token == EMPTY_TOKEN:  # it was let pass without the store
        return Settlement(SettlementOutcome.SETTLED, command.cost)
    answers: list[Settlement] = []
    wanted = list(zip(reservation.limits, command.amounts, strict=True))
    for part in group_by_slot(wanted, lambda one: slot_of(one[0].key)) or [[]]:
        limits, amounts = [limit for limit, _ in part], tuple(amount for _, amount in part)
        record = reservation.record
        if limits and slot_of(record) != slot_of(limits[0].key):
            record = encode_key(Keys.reservation(lane_prefix_of(decode_key(limits[0].key)), reservation.token))
        held = Reservation(reservation.token, record, limits)
        answers.append((yield from _settle_part(Settle(held, command.cost, amounts), around_us, time_us)))
    return next((answer for answer in answers if answer.outcome is SettlementOutcome.LAPSED), answers[0])


def _settle_part(command: Settle, around_us: int, time_us: int) -> Flow[Settlement]:
    reservation = command.reservation
    calendars = [Calendar(Period(c[0]), c[1], c[2]) if (c := limit.calendar) else None for limit in reservation.limits]
    windows: list[tuple[int, ...]] = [calendar.windows_around(around_us) if calendar else () for calendar in calendars]
    for _ in range(2 + 2 * len(windows)):
        request = (SETTLE, time_us, command.cost, command.amounts, windows)
        keys = [reservation.record, *(limit.key for limit in reservation.limits)]
        call = make_call(request, keys, [reservation.token])
        values = decode_reply(call, (yield call))
        _require_own_format(values, "the reservation or one of its buckets")
        match values:
            case [1, cost]:
                return Settlement(SettlementOutcome.SETTLED, cost)
            case [2]:
                return Settlement(SettlementOutcome.LAPSED, 0)
            case [4, at, now_us]:
                windows[at] = cast("Calendar", calendars[at]).windows_around(now_us)
            case [5]:
                raise InvalidInput("reservation_id", "names other limits than were reserved")
            case _:
                raise UnknownReservation("no such reservation, or its result was forgotten a day after its end")
    raise StoreCorrupt("no calendar window holds the time of its bucket")


def _no_calls() -> Flow[None]:
    """Redis keeps no denials: the shells drop theirs, and tell the others."""
    yield from ()


def _reset(command: Reset, slot_of: SlotOf) -> Flow[None]:
    for keys in group_by_slot(command.keys, slot_of):
        call = make_call((RESET, SERVER_TIME), keys)
        decode_reply(call, (yield call))


def _set_override(command: SetOverride, keys: Keys, time_us: int) -> Flow[Override]:
    compiled = [value for one in command.compiled for value in (one.name, one.code, len(one.numbers), *one.numbers)]
    call = make_call(
        (SET_OVERRIDE, time_us, command.ttl_us, compiled, MAX_PER_SUBJECT),
        [keys.overrides(command.lane_prefix, command.subject), keys.override_index(command.lane_prefix)],
        [command.subject, command.resource, json.dumps(command.changes)],
    )
    values = decode_reply(call, (yield call))
    _require_own_format(values, "the subject's overrides")
    if values[0] != 1:
        require_room_for_override(MAX_PER_SUBJECT + 1)
    return Override(command.tenant, command.resource, command.subject, command.changes, expiry_seconds(values[1]))


def _get_overrides(own: str, tenant: str, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[list[Override]]:
    if not subjects:
        return []
    call = make_call((GET_OVERRIDES, time_us), _index_and_overrides(own, subjects, keys), subjects)
    told, texts = _with_strings(call, (yield call), "a subject's overrides")
    values, strings = iter(told[1:]), iter(texts)
    found = []
    for subject in subjects:
        live = [
            Override(
                tenant,
                decode_key(next(strings)),
                decode_key(subject),
                json.loads(next(strings)),
                expiry_seconds(next(values)),
            )
            for _ in range(next(values))
        ]
        found += sorted(live, key=lambda override: encode_key(override.resource))
    return found


def _list_subjects(own: str, keys: Keys, after: bytes | None, count: int, time_us: int) -> Flow[list[bytes]]:
    start = b"-" if after is None else b"(" + after
    call = make_call((LIST_OVERRIDES, time_us, count), [keys.override_index(own)], [start])
    _, subjects = _with_strings(call, (yield call), "the index of overrides")
    return subjects


def _list_overrides(command: ListOverrides, keys: Keys, time_us: int) -> Flow[OverridePage]:
    """The first of each lane, and of those the first of all."""
    after = decode_cursor(command.cursor)
    found: list[tuple[bytes, str]] = []
    for own in command.key_prefixes:
        subjects = yield from _list_subjects(own, keys, after, command.subjects + 1, time_us)
        found += [(subject, own) for subject in subjects]
    found.sort()
    page, more = found[: command.subjects], len(found) > command.subjects
    overrides: dict[str, list[Override]] = {}
    for own in dict.fromkeys(own for _, own in page):
        here = [subject for subject, lane in page if lane == own]
        for override in (yield from _get_overrides(own, command.tenant, here, keys, time_us)):
            overrides.setdefault(override.subject, []).append(override)
    return OverridePage(
        [override for subject, _ in page for override in overrides.get(decode_key(subject), ())],
        encode_cursor(page[-1][0]) if more else None,
    )


def _find_missing_overrides(
    command: FindMissingOverrides, keys: Keys, slot_of: SlotOf, time_us: int
) -> Flow[list[int]]:
    missing: list[int] = []
    for positions in group_by_slot(range(len(command.targets)), lambda at: slot_of(command.targets[at][0])):
        for start in range(0, len(positions), _FIND_MISSING_BATCH):
            some = positions[start : start + _FIND_MISSING_BATCH]
            names, arguments = [], []
            for own, resource, subject in (command.targets[at] for at in some):
                names += [keys.overrides(own, subject), keys.override_index(own)]
                arguments += [subject, resource]
            call = make_call((FIND_MISSING_OVERRIDES, time_us), names, arguments)
            missing += [some[at - 1] for at in decode_reply(call, (yield call))[1:]]
    return sorted(missing)


def _delete_overrides(own: str, resource: str | None, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[int]:
    call = make_call(
        (DELETE_OVERRIDES, time_us, int(resource is None)),
        _index_and_overrides(own, subjects, keys),
        [resource or "", *subjects],
    )
    values = decode_reply(call, (yield call))
    _require_own_format(values, "the subject's overrides")
    return values[1]


def _delete_override(command: DeleteOverride, keys: Keys, time_us: int) -> Flow[bool]:
    return bool(
        (
            yield from _delete_overrides(
                command.lane_prefix, command.resource, [encode_key(command.subject)], keys, time_us
            )
        )
    )


def _clear_overrides(command: ClearOverrides, keys: Keys, time_us: int) -> Flow[int]:
    cleared = 0
    for own in command.key_prefixes:
        while subjects := (yield from _list_subjects(own, keys, None, _CLEAR_BATCH, time_us)):
            cleared += yield from _delete_overrides(own, None, subjects, keys, time_us)
    return cleared


def _index_and_overrides(own: str, subjects: list[bytes], keys: Keys) -> list[str]:
    return [keys.override_index(own), *(keys.overrides(own, decode_key(s)) for s in subjects)]


def _with_strings(call: ScriptCall, reply: Reply, what: str) -> tuple[list[int], list[bytes]]:
    """An answer that comes with strings; one without says that a key is not ours."""
    match reply:
        case [told, [*strings]]:
            return decode_reply(call, told), strings
    decode_reply(call, reply)
    raise foreign_value_error(what)


def _require_own_format(values: list[int], what: str) -> None:
    if values[0] == _FOREIGN_VALUE:
        raise foreign_value_error(what)
