"""Encode the commands as flows of calls: leases, reservations, resets and overrides."""

import json
from typing import Any, cast

from limitforge.core.calendar import Calendar, Period
from limitforge.core.handles import EMPTY_TOKEN, Reservation
from limitforge.core.keys import Keys, decode_key, encode_key, lane_prefix_of
from limitforge.core.overrides import (
    MAX_PER_SUBJECT,
    Override,
    OverridePage,
    check_override_count,
    decode_cursor,
    encode_cursor,
    expiry_seconds,
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
from limitforge.stores.redis.script_call import (
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
_FIND_MISSING_BATCH = 250  # overrides per call, which blocks Redis for about half a millisecond

SETTLE, RELEASE, RENEW, RESET, SET_OVERRIDE, GET_OVERRIDES, LIST_OVERRIDES, DELETE_OVERRIDES = range(2, 10)
FIND_MISSING_OVERRIDES = 13


def command_flow(command: Command[T], keys: Keys, slot_of: SlotOf, calendar_us: int, time_us: int) -> Flow[T]:
    """Return the flow of a command. All keys of one call are in one slot."""
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
    all_held = True
    for keys in group_by_slot(command.lease.keys, slot_of):
        call = make_call((operation, time_us), keys, [command.lease.token])
        values = decode_reply(call, (yield call))
        _require_own_format(values, "a bucket of the lease")
        all_held = all_held and values[0] == 1
    return all_held


def _settle(command: Settle, slot_of: SlotOf, calendar_us: int, time_us: int) -> Flow[Settlement]:
    """Settle a reservation, slot by slot. Each part is settled once, so that the command is idempotent."""
    reservation = command.reservation
    if reservation.token == EMPTY_TOKEN:  # admitted without the store, so that it holds nothing
        return Settlement(SettlementOutcome.SETTLED, command.cost)
    results: list[Settlement] = []
    limits_with_amounts = list(zip(reservation.limits, command.amounts, strict=True))
    for part in group_by_slot(limits_with_amounts, lambda each: slot_of(each[0].key)) or [[]]:
        limits, amounts = [limit for limit, _ in part], tuple(amount for _, amount in part)
        record = reservation.record_key
        if limits and slot_of(record) != slot_of(limits[0].key):
            record = encode_key(Keys.reservation_key(lane_prefix_of(decode_key(limits[0].key)), reservation.token))
        slot_part = Reservation(reservation.token, record, limits)
        results.append((yield from _settle_part(Settle(slot_part, command.cost, amounts), calendar_us, time_us)))
    return next((result for result in results if result.outcome is SettlementOutcome.LAPSED), results[0])


def _settle_part(command: Settle, calendar_us: int, time_us: int) -> Flow[Settlement]:
    reservation = command.reservation
    calendars = [Calendar(Period(c[0]), c[1], c[2]) if (c := limit.calendar) else None for limit in reservation.limits]
    windows: list[tuple[int, ...]] = [
        calendar.windows_around(calendar_us) if calendar else () for calendar in calendars
    ]
    for _ in range(2 + 2 * len(windows)):
        request = (SETTLE, time_us, command.cost, command.amounts, windows)
        keys = [reservation.record_key, *(limit.key for limit in reservation.limits)]
        call = make_call(request, keys, [reservation.token])
        values = decode_reply(call, (yield call))
        _require_own_format(values, "the reservation or one of its buckets")
        match values:
            case [1, cost]:
                return Settlement(SettlementOutcome.SETTLED, cost)
            case [2]:
                return Settlement(SettlementOutcome.LAPSED, 0)
            case [4, index, now_us]:
                windows[index] = cast("Calendar", calendars[index]).windows_around(now_us)
            case [5]:
                raise InvalidInput("reservation_id", "names other limits than were reserved")
            case _:
                raise UnknownReservation(
                    "unknown reservation id; results are deleted a day after the reservation ended"
                )
    raise StoreCorrupt("no calendar window contains the time of its bucket")


def _no_calls() -> Flow[None]:
    """Send nothing: denials are cached in the processes, not in Redis."""
    yield from ()


def _reset(command: Reset, slot_of: SlotOf) -> Flow[None]:
    for keys in group_by_slot(command.keys, slot_of):
        call = make_call((RESET, SERVER_TIME), keys)
        decode_reply(call, (yield call))


def _set_override(command: SetOverride, keys: Keys, time_us: int) -> Flow[Override]:
    compiled = [
        value for one in command.compiled for value in (one.name, one.code, len(one.parameters), *one.parameters)
    ]
    call = make_call(
        (SET_OVERRIDE, time_us, command.ttl_us, compiled, MAX_PER_SUBJECT),
        [keys.overrides_key(command.lane_prefix, command.subject), keys.override_index_key(command.lane_prefix)],
        [command.subject, command.resource, json.dumps(command.changes)],
    )
    values = decode_reply(call, (yield call))
    _require_own_format(values, "the subject's overrides")
    if values[0] != 1:
        check_override_count(MAX_PER_SUBJECT + 1)
    return Override(command.tenant, command.resource, command.subject, command.changes, expiry_seconds(values[1]))


def _get_overrides(prefix: str, tenant: str, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[list[Override]]:
    if not subjects:
        return []
    call = make_call((GET_OVERRIDES, time_us), _index_and_overrides(prefix, subjects, keys), subjects)
    numbers, texts = _decode_with_strings(call, (yield call), "a subject's overrides")
    values, strings = iter(numbers[1:]), iter(texts)
    overrides = []
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
        overrides += sorted(live, key=lambda override: encode_key(override.resource))
    return overrides


def _list_subjects(prefix: str, keys: Keys, after: bytes | None, count: int, time_us: int) -> Flow[list[bytes]]:
    start = b"-" if after is None else b"(" + after
    call = make_call((LIST_OVERRIDES, time_us, count), [keys.override_index_key(prefix)], [start])
    _, subjects = _decode_with_strings(call, (yield call), "the index of overrides")
    return subjects


def _list_overrides(command: ListOverrides, keys: Keys, time_us: int) -> Flow[OverridePage]:
    """Read one page from each lane, and return the first page of all of them together."""
    after = decode_cursor(command.cursor)
    candidates: list[tuple[bytes, str]] = []
    for prefix in command.lane_prefixes:
        subjects = yield from _list_subjects(prefix, keys, after, command.page_size + 1, time_us)
        candidates += [(subject, prefix) for subject in subjects]
    candidates.sort()
    page, has_more = candidates[: command.page_size], len(candidates) > command.page_size
    overrides: dict[str, list[Override]] = {}
    for prefix in dict.fromkeys(prefix for _, prefix in page):
        subjects = [subject for subject, lane in page if lane == prefix]
        for override in (yield from _get_overrides(prefix, command.tenant, subjects, keys, time_us)):
            overrides.setdefault(override.subject, []).append(override)
    return OverridePage(
        [override for subject, _ in page for override in overrides.get(decode_key(subject), ())],
        encode_cursor(page[-1][0]) if has_more else None,
    )


def _find_missing_overrides(
    command: FindMissingOverrides, keys: Keys, slot_of: SlotOf, time_us: int
) -> Flow[list[int]]:
    missing: list[int] = []
    for positions in group_by_slot(range(len(command.targets)), lambda index: slot_of(command.targets[index][0])):
        for start in range(0, len(positions), _FIND_MISSING_BATCH):
            batch = positions[start : start + _FIND_MISSING_BATCH]
            names, arguments = [], []
            for prefix, resource, subject in (command.targets[index] for index in batch):
                names += [keys.overrides_key(prefix, subject), keys.override_index_key(prefix)]
                arguments += [subject, resource]
            call = make_call((FIND_MISSING_OVERRIDES, time_us), names, arguments)
            missing += [batch[position - 1] for position in decode_reply(call, (yield call))[1:]]
    return sorted(missing)


def _delete_overrides(prefix: str, resource: str | None, subjects: list[bytes], keys: Keys, time_us: int) -> Flow[int]:
    call = make_call(
        (DELETE_OVERRIDES, time_us, int(resource is None)),
        _index_and_overrides(prefix, subjects, keys),
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
    for prefix in command.lane_prefixes:
        while subjects := (yield from _list_subjects(prefix, keys, None, _CLEAR_BATCH, time_us)):
            cleared += yield from _delete_overrides(prefix, None, subjects, keys, time_us)
    return cleared


def _index_and_overrides(prefix: str, subjects: list[bytes], keys: Keys) -> list[str]:
    return [keys.override_index_key(prefix), *(keys.overrides_key(prefix, decode_key(s)) for s in subjects)]


def _decode_with_strings(call: ScriptCall, reply: Reply, what: str) -> tuple[list[int], list[bytes]]:
    """Decode a reply with strings. A reply without them means that a key holds a foreign value."""
    match reply:
        case [numbers, [*strings]]:
            return decode_reply(call, numbers), strings
    decode_reply(call, reply)
    raise foreign_value_error(what)


def _require_own_format(values: list[int], what: str) -> None:
    if values[0] == _FOREIGN_VALUE:
        raise foreign_value_error(what)
