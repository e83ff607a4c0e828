"""What goes to the script and what comes back, without any I/O.

Each request is a flow: a generator that yields calls, is sent their replies, and returns the answer. The shells only
carry calls, so they share everything else.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count, groupby
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from limitforge.core.check import Check
from limitforge.core.decide import too_many_reservations
from limitforge.core.decision import OVERFLOWED, Admission, Judged, Outcome, decision_of
from limitforge.core.keys import begun_key, encoded, overflow_key, override_index_of, own_of
from limitforge.core.plan import Rule
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreUnavailable
from limitforge.stores.hints import Hints
from limitforge.stores.new_buckets import SHARED_ALREADY, NewBuckets
from limitforge.stores.resilience import NotAsked, StoreFull
from limitforge.stores.shares import Grant, Wish
from limitforge.stores.slots import SlotOf, by_slot
from limitforge.stores.spread import Finish

BUSY_US = 1_000  # what one call may keep Redis busy, by estimate

CHECK, FINISH, SHARES, NODES = 1, 10, 11, 12
DENIED, ALLOWED, AGAIN, CORRUPT, TOO_MANY, UNWRITTEN, OVERRIDDEN, PLAIN, OVERFLOWS = range(9)
FULL = "it is full (maxmemory) and may evict nothing"
OWN_TIME = -1  # in place of a time: let Redis read its clock

T = TypeVar("T")


class Call(NamedTuple):
    """KEYS and ARGV of one call of the script. What is `str` goes out as UTF-8, its surrogate escapes as bytes.

    The answer ends with the call's `number`: should a proxy ever lose an answer, nobody takes the next one for it.
    """

    keys: Sequence[str | bytes]
    args: Sequence[str | bytes]
    number: int
    slots: tuple[int, ...] = ()
    """How many of the keys lie in each slot, one after the other; empty if all are in one."""


class Unreplicated(NamedTuple):
    """A reply whose writes too few replicas have: what it took may be lost, what it denied or told is as it is."""

    reply: Any
    replicas: object
    wanted: int

    def error(self) -> StoreUnavailable:
        said = f"{self.replicas} of {self.wanted} replicas have what was written"
        return NotReplicated(said, maybe_counted=True)


class NotReplicated(NotAsked):
    """The store did what it was asked for, and a failover might undo it: no failure of the server."""


Reply = bytes | list[Any] | Unreplicated
Flow = Generator[Call, Reply, T]
Told = Outcome | Admission | LimitforgeError
Note = Callable[[Check, Outcome], None]
"""Told of each denial."""

_log = logging.getLogger(__name__)
_numbers = count(1)
_MOST_CALLS = 2**31
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


def call_of(request: tuple[Any, ...], keys: Sequence[str | bytes], strings: Iterable[str | bytes] = ()) -> Call:
    """One call of the script, with a number of its own."""
    number = next(_numbers) % _MOST_CALLS
    return Call(keys, [_encode((*request, number)), *strings], number)


def answer_to(call: Call, reply: Reply) -> list[int]:
    """What the script answered to this call, and to no other."""
    if isinstance(reply, Unreplicated):
        raise reply.error()
    values: list[int] = []
    if not isinstance(reply, int):  # the answer to a message, never to a call
        try:
            values = _decode(cast("bytes", reply))
        except (msgspec.MsgspecError, TypeError):
            raise _nonsense() from None
    if not values or values.pop() != call.number:
        raise StoreUnavailable("an answer of Redis was lost on the way, and another took its place", maybe_counted=True)
    return values


def as_corrupt(error: Exception) -> LimitforgeError:
    """What the caller is told of an answer that could not be read; if that is a bug of ours, the log has it whole."""
    if isinstance(error, LimitforgeError):
        return error
    _log.error("an answer of the script could not be read", exc_info=error)
    return StoreCorrupt(f"an answer of the script could not be read: {type(error).__name__}")


def _nonsense() -> StoreCorrupt:
    return StoreCorrupt("the answer to the script makes no sense: does something else answer in Redis's place?")


def batch_flow(
    checks: Sequence[Check],
    around_us: int,
    time_us: int,
    note: Note | None = None,
    overridden: Hints | None = None,
    new_buckets: NewBuckets | None = None,
) -> Flow[list[Judged]]:
    """Judge checks in order, all in one call. Calendars are laid around `around_us`, the caller's time; `time_us`
    replaces Redis's own unless it is OWN_TIME. Who is not `overridden` is believed to have no overrides. `new_buckets`
    bounds how many buckets a tenant may begin.
    """
    groups = checks
    if any([check.shadow is not None for check in checks]):  # noqa: C419 - a list is twice as fast
        groups = [group for check in checks for group in (check, check.shadow) if group is not None]
    for group in groups:
        if group.varies:
            group.around(around_us)
    doubts: list[Unreplicated] = []
    outcomes = yield from _judge(groups, time_us, doubts, overridden, new_buckets)
    shadows: dict[int, Outcome] = {}
    if groups is not checks:
        outcomes, shadows = _parted(checks, outcomes)
    answers: list[Judged] = []
    for at, (check, outcome) in enumerate(zip(checks, outcomes, strict=True)):
        answer: Judged = outcome
        if doubts and _has_taken(check, outcome):
            answer = doubts[0].error()
        elif isinstance(outcome, Outcome) and not check.is_part:
            if new_buckets is not None and any(row[4] >= OVERFLOWED for row in outcome.rows):
                new_buckets.count_overflow()
            if not outcome.allowed and note is not None:
                note(check, outcome)
            if not check.is_raw or at in shadows:
                answer = decision_of(check, outcome, shadows.get(at))
        answers.append(answer)
    return answers


def _has_taken(check: Check, told: Told) -> bool:
    is_allowed = isinstance(told, Admission) or (isinstance(told, Outcome) and told.allowed)
    return is_allowed and any(cost for _, _, cost, *_ in check.takes)


def _parted(checks: Sequence[Check], judged: Sequence[Told]) -> tuple[list[Told], dict[int, Outcome]]:
    """What the checks were told, and what their candidate plans were. A candidate must never harm the live plan: what
    is wrong with its buckets only leaves it out.
    """
    told = iter(judged)
    outcomes: list[Told] = []
    shadows: dict[int, Outcome] = {}
    for at, check in enumerate(checks):
        outcomes.append(next(told))
        if check.shadow is not None and isinstance(shadow := next(told), Outcome):
            shadows[at] = shadow
    return outcomes, shadows


def finish_flow(finishes: Sequence[Finish], time_us: int) -> Flow[list[Any]]:
    """End what parts of checks hold, all in one call; each is told its sources, or None."""
    keys: dict[str, int] = {}
    strings: dict[str | bytes, int] = {}
    flat: list[int] = []
    for finish in finishes:
        places = [keys.setdefault(key, len(keys) + 1) for key in finish.keys]
        token = strings.setdefault(finish.token, len(strings) + 2)
        flat += (finish.ending, token, finish.ttl_us, int(finish.refund), finish.lapses_us, len(places))
        flat += [-place if optional else place for place, optional in zip(places, finish.optional, strict=True)]
        flat += finish.amounts
        flat += (source for source, _ in finish.sources)
        flat += (starts for _, starts in finish.sources)
    call = call_of((FINISH, time_us, flat), list(keys), strings)
    values = iter(answer_to(call, (yield call)))
    return [[(next(values), next(values)) for _ in finish.keys] if next(values) else None for finish in finishes]


def shares_flow(
    wishes: Sequence[Wish], around_us: int, time_us: int, lapse_us: int, new_buckets: NewBuckets | None = None
) -> Flow[list[Grant | None]]:
    """Pay for shares of leased limits, and bring some back, all in one call; None where the store could not say."""
    keys: dict[str, int] = {}
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}
    flat: list[int] = []
    for wish in wishes:
        share = wish.share
        flat += (
            rules.setdefault(share.rule.around(around_us), len(rules) + 1),
            keys.setdefault(share.key, len(keys) + 1),
        )
        flat.append(0 if share.overrides is None else keys.setdefault(share.overrides, len(keys) + 1))
        flat += (strings.setdefault(name, len(strings) + 2) for name in (share.resource, share.token))
        flat += (wish.returned, *share.window, wish.kept, wish.wanted, lapse_us)
    request: tuple[Any, ...] = (SHARES, time_us, [rule.row for rule in rules], flat)
    counters: list[str] = []
    if new_buckets is not None:
        counters = list({begun_key(own_of(wish.share.key)): None for wish in wishes})
        request = (*request, [new_buckets.per_minute, *(0 for _ in counters)])
    call = call_of(request, [*keys, *counters], strings)
    values = answer_to(call, (yield call))
    rows = [values[at : at + 7] for at in range(1, len(values), 7)]
    return [Grant(*told) if status == 1 else None for status, *told in rows]


def members_flow(key: str, name: bytes, alive_us: int, time_us: int) -> Flow[int]:
    """Say that a process is alive for that long (0: no more), and hear how many are."""
    call = call_of((NODES, time_us, alive_us), [key], [name])
    return answer_to(call, (yield call))[0]


def _judge(
    groups: Sequence[Check],
    time_us: int,
    doubts: list[Unreplicated],
    overridden: Hints | None,
    new_buckets: NewBuckets | None,
) -> Flow[list[Told]]:
    """Judge groups of limits in order, each with the store's time.

    The script stops at one whose calendar does not reach that time, whose subject may have overrides after all, or
    whose tenant may begin no more buckets, since the rest must see what it takes: it and they are asked once more, and
    then with everybody's overrides.
    """
    outcomes: list[Told] = []
    asks = 0
    asked, hints, overflows = groups, overridden, False
    while True:
        call = encode_checks(asked, time_us, hints, new_buckets, overflows=overflows)
        missing = _read_outcomes(asked, call, answer_to(call, _doubted((yield call), doubts)), outcomes)
        if missing is not None:
            status, key = missing
            if status == OVERFLOWS and new_buckets is not None:
                new_buckets.overflowing.add(key)
                overflows = True  # others of this batch may have used up their budgets too: one more call is enough
            elif overridden is not None:
                overridden.add(key)
        if len(outcomes) == len(groups):
            return outcomes
        asked, hints = groups[len(outcomes) :], None
        asks += 1
        if asks > 3 * sum(len(group.takes) for group in groups) + 1:
            return outcomes + [StoreCorrupt("no calendar window holds the time of its bucket")] * len(asked)


def _doubted(reply: Reply, doubts: list[Unreplicated]) -> Reply:
    """The reply by itself; that too few replicas have it is noted."""
    if not isinstance(reply, Unreplicated):
        return reply
    doubts.append(reply)
    told: Reply = reply.reply
    return told


def encode_checks(  # noqa: C901, PLR0912, PLR0915 - the hot path: one loop, and no call that can be spared
    checks: Sequence[Check],
    time_us: int,
    overridden: Hints | None = None,
    new_buckets: NewBuckets | None = None,
    *,
    overflows: bool = False,
) -> Call:
    """Every key, rule and string once, however many checks use it. Anybody may have overrides if that is not told;
    with `overflows`, the overflow buckets of all lanes are sent along.
    """
    keys: dict[str, int] = {}  # by place in a list that Lua reads from 1
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}  # from 2: ARGV's strings come after the blob
    indices: dict[str, int] = {}  # 0 for those who may have overrides
    flat: list[int] = []
    counters: dict[str, bool] = {}  # of the buckets begun in a lane: whether its overflow buckets are sent along
    overflowing: list[str] = []
    overflow: list[int] = []  # the places of a bucket and of its overflow bucket, in turns

    def counted(own: str) -> bool:
        counter = begun_key(own)
        if counter not in counters:
            counters[counter] = overflows or (new_buckets is not None and counter in new_buckets.overflowing)
            overflowing.extend([counter] if counters[counter] else [])
        return counters[counter]

    def looked_at(index: str) -> int:
        has_some = overridden is None or index in overridden
        if new_buckets is not None and counted(own_of(index)):
            has_some = True  # the long way, which adds the overflow buckets
        place = indices[index] = 0 if has_some else keys.setdefault(index, len(keys) + 1)
        return place

    for check in checks:
        question, lease, hold = check.question, check.lease, check.hold
        if question is not None and hold is None and not lease:  # the short way, of nearly all
            known = indices.get(question.index)
            if known is None:
                known = looked_at(question.index)
            if known:
                base, cost, alike = check.base, check.cost, question.plan.alike
                flat += (len(alike), 0, 0)
                for rule, suffix, requests, overridable in alike:
                    flat += (
                        rules.setdefault(rule, len(rules) + 1),
                        keys.setdefault(base + suffix, len(keys) + 1),
                        1 if requests and cost else cost,
                        known if overridable else 0,
                        0,
                    )
                continue
        takes = check.takes
        token = strings.setdefault(lease, len(strings) + 2) if lease else 0
        if hold is None:
            flat += (len(takes), token, 0)
        else:
            record = keys.setdefault(hold.key, len(keys) + 1) if hold.key else -1
            refund = int(hold.refund) + 2 * hold.awaits
            flat += (len(takes), token, record, strings.setdefault(hold.token, len(strings) + 2), hold.ttl_us, refund)
        last: str | None = None
        asked: object = None
        place = resource_place = 0
        for rule, key, cost, resource, overrides in takes:
            # The bucket's key comes before that of the overrides.
            rule_place, key_place = rules.setdefault(rule, len(rules) + 1), keys.setdefault(key, len(keys) + 1)
            if overrides is None:
                flat += (rule_place, key_place, cost, 0, 0)
                if new_buckets is not None and rule.scope not in SHARED_ALREADY:
                    counted(own_of(key))
            else:
                if overrides is not last or resource is not asked:
                    last, asked = overrides, resource
                    index = override_index_of(overrides)
                    known = indices.get(index)
                    place, resource_place = looked_at(index) if known is None else known, 0
                    if not place:
                        place = keys.setdefault(overrides, len(keys) + 1)
                        resource_place = strings.setdefault(resource, len(strings) + 2)
                flat += (rule_place, key_place, cost, place, resource_place)
            if overflowing and rule.scope not in SHARED_ALREADY and counted(own_of(key)):
                shared = overflow_key(key, rule.overflow_suffix)
                overflow += (key_place, keys.setdefault(shared, len(keys) + 1))
    rows = [rule.row for rule in rules]
    if new_buckets is None:
        return call_of((CHECK, time_us, rows, flat), list(keys), strings)
    budget = [new_buckets.per_minute, *map(int, counters.values())]
    return call_of((CHECK, time_us, rows, flat, budget, overflow), [*keys, *counters], strings)


def _read_outcomes(
    checks: Sequence[Check], call: Call, values: list[int], outcomes: list[Told]
) -> tuple[int, str] | None:
    """Adds what the reply tells. Stops at a check that must be asked again, which it then is ready for; if that is for
    overrides that are there after all, or for a budget that is used up, it returns which, and the key that says so.
    """
    if len(values) <= len(checks) and not {AGAIN, OVERRIDDEN, OVERFLOWS}.intersection(values):
        raise _nonsense()
    now_us, place = values[0], 1
    for check in checks:
        status, question = values[place], check.question
        takes = len(check.takes) if question is None else len(question.plan.alike)
        if status == PLAIN:
            start, place = place + 1, place + 1 + 2 * takes
            admission = Admission(now_us, values[start:place])
            is_all = check.is_raw and check.shadow is None
            outcomes.append(admission if is_all else admission.outcome(check))
        elif status <= ALLOWED:
            start, place = place + 2, place + 2 + 5 * takes
            rows: Any
            if takes == 1:
                rows = [values[start:place]]
            elif takes == 2:
                rows = [values[start : start + 5], values[start + 5 : place]]
            else:
                rows = [values[at : at + 5] for at in range(start, place, 5)]
            outcomes.append(Outcome(now_us, status == ALLOWED, values[start - 1], rows))
        elif status == AGAIN:
            check.around_one(values[place + 1], values[place + 2])
            return None
        elif status in (OVERRIDDEN, OVERFLOWS):
            return status, cast("str", call.keys[values[place + 1] - 1])
        elif status == CORRUPT:
            outcomes.append(_corrupt(check, call.keys[values[place + 1] - 1]))
            place += 2
        elif status == UNWRITTEN:
            outcomes.append(StoreFull(f"Redis can't serve now: {FULL} (OOM)"))
            place += 1
        else:
            outcomes.append(too_many_reservations(check.takes[values[place + 1]][0]))
            place += 2
    return None


def _corrupt(check: Check, key: str | bytes) -> StoreCorrupt:
    """Names the limit, not the key: a key holds the subject, and errors are logged."""
    name = next(
        (rule.limit.name for rule, own, *_ in check.takes if key in (own, overflow_key(own, rule.overflow_suffix))),
        None,
    )
    return not_ours(f"the bucket of limit {name!r}" if name else "the subject's overrides")


def not_ours(what: str) -> StoreCorrupt:
    return StoreCorrupt(f"{what} holds a value that limitforge did not write; see who else uses this key prefix")


def fitting(weights_us: Sequence[int]) -> Iterable[range]:
    """Which of these one call can take, in order."""
    first, busy_us = 0, 0
    for at, weight_us in enumerate(weights_us):
        if at > first and busy_us + weight_us > BUSY_US:
            yield range(first, at)
            first, busy_us = at, 0
        busy_us += weight_us
    if weights_us:
        yield range(first, len(weights_us))


def parts(checks: Sequence[Check], slot_of: SlotOf) -> Iterable[Sequence[Check]]:
    """The same for checks of one take each, from any slots."""
    for together in by_slot(checks, lambda check: slot_of(check.takes[0][1])):
        for part in fitting([check.weight_us for check in together]):
            yield together[part.start : part.stop]


def one_call(call: Call) -> Flow[Reply]:
    """A call whose reply is somebody else's affair."""
    return (yield call)


def wire_strings(call: Call) -> Call:
    """The same with every string as bytes, for those whose escapes are no UTF-8."""
    keys, args = ([encoded(s) if isinstance(s, str) else s for s in strings] for strings in (call.keys, call.args))
    return Call(keys, args, call.number, call.slots)


def across(call: Call, slot_of: SlotOf) -> Call:
    """The same call over several slots, whose keys follow each other slot by slot."""
    lengths = [len(list(run)) for _, run in groupby(call.keys, slot_of)]
    return call._replace(slots=tuple(lengths)) if len(lengths) > 1 else call
