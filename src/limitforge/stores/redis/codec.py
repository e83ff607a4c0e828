"""What goes to the script and what comes back, without any I/O.

Each request is a flow: a generator that yields calls, is sent their replies, and returns the answer. The shells only
carry calls, so they share everything else.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count, groupby
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from limitforge.core.check import Check, ResultKind
from limitforge.core.decision import OVERFLOWED, CheckResult, CompactOutcome, Outcome, build_decision
from limitforge.core.evaluate import too_many_reservations
from limitforge.core.keys import encode_key, lane_prefix_of, new_bucket_counter_key, overflow_key, override_index_of
from limitforge.core.plan import Rule
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreUnavailable
from limitforge.stores.memory.new_buckets import EXEMPT_SCOPES
from limitforge.stores.redis.key_hints import KeyHints
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.shares import TopUpReply, TopUpRequest
from limitforge.stores.redis.topology.cross_slot import FinishHold
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot
from limitforge.stores.resilience.failure import NotServerFault, StoreFull

# A member that is looked up on its enum takes three times as long.
_PART, _OUTCOME = ResultKind.PART, ResultKind.OUTCOME

MAX_CALL_US = 1_000  # what one call may keep Redis busy, by estimate

CHECK, FINISH, TOP_UP, HEARTBEAT = 1, 10, 11, 12
(
    DENIED,
    ALLOWED,
    NEEDS_CALENDAR,
    CORRUPT,
    TOO_MANY_RESERVATIONS,
    NOT_WRITTEN,
    NEEDS_OVERRIDES,
    ALLOWED_PLAIN,
    NEEDS_OVERFLOW_KEYS,
) = range(9)
FULL_REASON = "it is full (maxmemory) and may evict nothing"
SERVER_TIME = -1  # in place of a time: let Redis read its clock

T = TypeVar("T")


class ScriptCall(NamedTuple):
    """KEYS and ARGV of one call of the script. What is `str` goes out as UTF-8, its surrogate escapes as bytes.

    The answer ends with the call's `number`: should a proxy ever lose an answer, nobody takes the next one for it.
    """

    keys: Sequence[str | bytes]
    args: Sequence[str | bytes]
    call_id: int
    keys_per_slot: tuple[int, ...] = ()
    """How many of the keys lie in each slot, one after the other; empty if all are in one."""


class UnreplicatedReply(NamedTuple):
    """A reply whose writes too few replicas have: what it took may be lost, what it denied or told is as it is."""

    reply: Any
    replicas: object
    wanted: int

    def to_error(self) -> StoreUnavailable:
        said = f"{self.replicas} of {self.wanted} replicas have what was written"
        return NotReplicated(said, maybe_counted=True)


class NotReplicated(NotServerFault):
    """The store did what it was asked for, and a failover might undo it: no failure of the server."""


Reply = bytes | list[Any] | UnreplicatedReply
Flow = Generator[ScriptCall, Reply, T]
ScriptResult = Outcome | CompactOutcome | LimitforgeError
OnDenial = Callable[[Check, Outcome], None]
"""Told of each denial."""

_log = logging.getLogger(__name__)
_numbers = count(1)
_MOST_CALLS = 2**31
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int]).decode


def make_call(request: tuple[Any, ...], keys: Sequence[str | bytes], strings: Iterable[str | bytes] = ()) -> ScriptCall:
    """One call of the script, with a number of its own."""
    number = next(_numbers) % _MOST_CALLS
    return ScriptCall(keys, [_encode((*request, number)), *strings], number)


def decode_reply(call: ScriptCall, reply: Reply) -> list[int]:
    """What the script answered to this call, and to no other."""
    if isinstance(reply, UnreplicatedReply):
        raise reply.to_error()
    values: list[int] = []
    if not isinstance(reply, int):  # the answer to a message, never to a call
        try:
            values = _decode(cast("bytes", reply))
        except (msgspec.MsgspecError, TypeError):
            raise _invalid_reply() from None
    if not values or values.pop() != call.call_id:
        raise StoreUnavailable("an answer of Redis was lost on the way, and another took its place", maybe_counted=True)
    return values


def as_corrupt_reply(error: Exception) -> LimitforgeError:
    """What the caller is told of an answer that could not be read; if that is a bug of ours, the log has it whole."""
    if isinstance(error, LimitforgeError):
        return error
    _log.error("an answer of the script could not be read", exc_info=error)
    return StoreCorrupt(f"an answer of the script could not be read: {type(error).__name__}")


def _invalid_reply() -> StoreCorrupt:
    return StoreCorrupt("the answer to the script makes no sense: does something else answer in Redis's place?")


def check_flow(
    checks: Sequence[Check],
    calendar_us: int,
    time_us: int,
    on_denial: OnDenial | None = None,
    override_hints: KeyHints | None = None,
    new_buckets: NewBucketBudget | None = None,
) -> Flow[list[CheckResult]]:
    """Judge checks in order, all in one call. Calendars are laid around `around_us`, the caller's time; `time_us`
    replaces Redis's own unless it is OWN_TIME. Who is not `overridden` is believed to have no overrides. `new_buckets`
    bounds how many buckets a tenant may begin.
    """
    groups = checks
    if any([check.shadow is not None for check in checks]):  # noqa: C419 - a list is twice as fast
        groups = [group for check in checks for group in (check, check.shadow) if group is not None]
    for group in groups:
        if group.is_dynamic:
            group.resolve_calendars(calendar_us)
    doubts: list[UnreplicatedReply] = []
    outcomes = yield from _evaluate(groups, time_us, doubts, override_hints, new_buckets)
    shadows: dict[int, Outcome] = {}
    if groups is not checks:
        outcomes, shadows = _split_shadows(checks, outcomes)
    answers: list[CheckResult] = []
    for at, (check, outcome) in enumerate(zip(checks, outcomes, strict=True)):
        answer: CheckResult = outcome
        if doubts and _took_anything(check, outcome):
            answer = doubts[0].to_error()
        elif isinstance(outcome, Outcome) and check.result_kind is not _PART:
            if new_buckets is not None and any(row[4] >= OVERFLOWED for row in outcome.rows):
                new_buckets.count_overflow()
            if not outcome.allowed and on_denial is not None:
                on_denial(check, outcome)
            if check.result_kind is not _OUTCOME or at in shadows:
                answer = build_decision(check, outcome, shadows.get(at))
        answers.append(answer)
    return answers


def _took_anything(check: Check, told: ScriptResult) -> bool:
    is_allowed = isinstance(told, CompactOutcome) or (isinstance(told, Outcome) and told.allowed)
    return is_allowed and any(cost for _, _, cost, *_ in check.debits)


def _split_shadows(
    checks: Sequence[Check], judged: Sequence[ScriptResult]
) -> tuple[list[ScriptResult], dict[int, Outcome]]:
    """What the checks were told, and what their candidate plans were. A candidate must never harm the live plan: what
    is wrong with its buckets only leaves it out.
    """
    told = iter(judged)
    outcomes: list[ScriptResult] = []
    shadows: dict[int, Outcome] = {}
    for at, check in enumerate(checks):
        outcomes.append(next(told))
        if check.shadow is not None and isinstance(shadow := next(told), Outcome):
            shadows[at] = shadow
    return outcomes, shadows


def finish_flow(finishes: Sequence[FinishHold], time_us: int) -> Flow[list[Any]]:
    """End what parts of checks hold, all in one call; each is told its sources, or None."""
    keys: dict[str, int] = {}
    strings: dict[str | bytes, int] = {}
    flat: list[int] = []
    for finish in finishes:
        places = [keys.setdefault(key, len(keys) + 1) for key in finish.keys]
        token = strings.setdefault(finish.token, len(strings) + 2)
        flat += (
            finish.action,
            token,
            finish.ttl_us,
            int(finish.refunds_on_lapse),
            finish.forgotten_before_us,
            len(places),
        )
        flat += [-place if optional else place for place, optional in zip(places, finish.optional, strict=True)]
        flat += finish.amounts
        flat += (source for source, _ in finish.sources)
        flat += (starts for _, starts in finish.sources)
    call = make_call((FINISH, time_us, flat), list(keys), strings)
    values = iter(decode_reply(call, (yield call)))
    return [[(next(values), next(values)) for _ in finish.keys] if next(values) else None for finish in finishes]


def top_up_flow(
    wishes: Sequence[TopUpRequest],
    calendar_us: int,
    time_us: int,
    lapse_us: int,
    new_buckets: NewBucketBudget | None = None,
) -> Flow[list[TopUpReply | None]]:
    """Pay for shares of leased limits, and bring some back, all in one call; None where the store could not say."""
    keys: dict[str, int] = {}
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}
    flat: list[int] = []
    for wish in wishes:
        share = wish.share
        flat += (
            rules.setdefault(share.rule.at_time(calendar_us), len(rules) + 1),
            keys.setdefault(share.key, len(keys) + 1),
        )
        flat.append(0 if share.overrides is None else keys.setdefault(share.overrides, len(keys) + 1))
        flat += (strings.setdefault(name, len(strings) + 2) for name in (share.resource, share.token))
        flat += (wish.returned, *share.window, wish.kept, wish.requested, lapse_us)
    request: tuple[Any, ...] = (TOP_UP, time_us, [rule.script_args for rule in rules], flat)
    counters: list[str] = []
    if new_buckets is not None:
        counters = list({new_bucket_counter_key(lane_prefix_of(wish.share.key)): None for wish in wishes})
        request = (*request, [new_buckets.per_minute, *(0 for _ in counters)])
    call = make_call(request, [*keys, *counters], strings)
    values = decode_reply(call, (yield call))
    rows = [values[at : at + 7] for at in range(1, len(values), 7)]
    return [TopUpReply(*told) if status == 1 else None for status, *told in rows]


def heartbeat_flow(key: str, name: bytes, alive_us: int, time_us: int) -> Flow[int]:
    """Say that a process is alive for that long (0: no more), and hear how many are."""
    call = make_call((HEARTBEAT, time_us, alive_us), [key], [name])
    return decode_reply(call, (yield call))[0]


def _evaluate(
    groups: Sequence[Check],
    time_us: int,
    doubts: list[UnreplicatedReply],
    overridden: KeyHints | None,
    new_buckets: NewBucketBudget | None,
) -> Flow[list[ScriptResult]]:
    """Judge groups of limits in order, each with the store's time.

    The script stops at one whose calendar does not reach that time, whose subject may have overrides after all, or
    whose tenant may begin no more buckets, since the rest must see what it takes: it and they are asked once more, and
    then with everybody's overrides.
    """
    outcomes: list[ScriptResult] = []
    asks = 0
    asked, hints, overflows = groups, overridden, False
    while True:
        call = encode_checks(asked, time_us, hints, new_buckets, with_overflow_keys=overflows)
        missing = _decode_outcomes(asked, call, decode_reply(call, _unwrap_reply((yield call), doubts)), outcomes)
        if missing is not None:
            status, key = missing
            if status == NEEDS_OVERFLOW_KEYS and new_buckets is not None:
                new_buckets.exhausted_lanes.add(key)
                overflows = True  # others of this batch may have used up their budgets too: one more call is enough
            elif overridden is not None:
                overridden.add(key)
        if len(outcomes) == len(groups):
            return outcomes
        asked, hints = groups[len(outcomes) :], None
        asks += 1
        if asks > 3 * sum(len(group.debits) for group in groups) + 1:
            return outcomes + [StoreCorrupt("no calendar window holds the time of its bucket")] * len(asked)


def _unwrap_reply(reply: Reply, doubts: list[UnreplicatedReply]) -> Reply:
    """The reply by itself; that too few replicas have it is noted."""
    if not isinstance(reply, UnreplicatedReply):
        return reply
    doubts.append(reply)
    told: Reply = reply.reply
    return told


def encode_checks(  # noqa: C901, PLR0912, PLR0915 - the hot path: one loop, and no call that can be spared
    checks: Sequence[Check],
    time_us: int,
    override_hints: KeyHints | None = None,
    new_buckets: NewBucketBudget | None = None,
    *,
    with_overflow_keys: bool = False,
) -> ScriptCall:
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
        counter = new_bucket_counter_key(own)
        if counter not in counters:
            counters[counter] = with_overflow_keys or (
                new_buckets is not None and counter in new_buckets.exhausted_lanes
            )
            overflowing.extend([counter] if counters[counter] else [])
        return counters[counter]

    def looked_at(index: str) -> int:
        has_some = override_hints is None or index in override_hints
        if new_buckets is not None and counted(lane_prefix_of(index)):
            has_some = True  # the long way, which adds the overflow buckets
        place = indices[index] = 0 if has_some else keys.setdefault(index, len(keys) + 1)
        return place

    for check in checks:
        question, lease, hold = check.prepared, check.lease, check.hold
        if question is not None and hold is None and not lease:  # the short way, of nearly all
            known = indices.get(question.override_index)
            if known is None:
                known = looked_at(question.override_index)
            if known:
                base, cost, alike = check.bucket_prefix, check.cost, question.plan.uniform_rules
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
        takes = check.debits
        token = strings.setdefault(lease, len(strings) + 2) if lease else 0
        if hold is None:
            flat += (len(takes), token, 0)
        else:
            record = keys.setdefault(hold.key, len(keys) + 1) if hold.key else -1
            refund = int(hold.refund) + 2 * hold.needs_confirmation
            flat += (len(takes), token, record, strings.setdefault(hold.token, len(strings) + 2), hold.ttl_us, refund)
        last: str | None = None
        asked: object = None
        place = resource_place = 0
        for rule, key, cost, resource, overrides in takes:
            # The bucket's key comes before that of the overrides.
            rule_place, key_place = rules.setdefault(rule, len(rules) + 1), keys.setdefault(key, len(keys) + 1)
            if overrides is None:
                flat += (rule_place, key_place, cost, 0, 0)
                if new_buckets is not None and rule.scope not in EXEMPT_SCOPES:
                    counted(lane_prefix_of(key))
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
            if overflowing and rule.scope not in EXEMPT_SCOPES and counted(lane_prefix_of(key)):
                shared = overflow_key(key, rule.overflow_suffix)
                overflow += (key_place, keys.setdefault(shared, len(keys) + 1))
    rows = [rule.script_args for rule in rules]
    if new_buckets is None:
        return make_call((CHECK, time_us, rows, flat), list(keys), strings)
    budget = [new_buckets.per_minute, *map(int, counters.values())]
    return make_call((CHECK, time_us, rows, flat, budget, overflow), [*keys, *counters], strings)


def _decode_outcomes(
    checks: Sequence[Check], call: ScriptCall, values: list[int], outcomes: list[ScriptResult]
) -> tuple[int, str] | None:
    """Adds what the reply tells. Stops at a check that must be asked again, which it then is ready for; if that is for
    overrides that are there after all, or for a budget that is used up, it returns which, and the key that says so.
    """
    if len(values) <= len(checks) and not {NEEDS_CALENDAR, NEEDS_OVERRIDES, NEEDS_OVERFLOW_KEYS}.intersection(values):
        raise _invalid_reply()
    now_us, place = values[0], 1
    for check in checks:
        status, question = values[place], check.prepared
        takes = len(check.debits) if question is None else len(question.plan.uniform_rules)
        if status == ALLOWED_PLAIN:
            start, place = place + 1, place + 1 + 2 * takes
            admission = CompactOutcome(now_us, values[start:place])
            is_all = check.result_kind is _OUTCOME and check.shadow is None
            outcomes.append(admission if is_all else admission.expand(check))
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
        elif status == NEEDS_CALENDAR:
            check.resolve_calendar(values[place + 1], values[place + 2])
            return None
        elif status in (NEEDS_OVERRIDES, NEEDS_OVERFLOW_KEYS):
            return status, cast("str", call.keys[values[place + 1] - 1])
        elif status == CORRUPT:
            outcomes.append(_corrupt_bucket(check, call.keys[values[place + 1] - 1]))
            place += 2
        elif status == NOT_WRITTEN:
            outcomes.append(StoreFull(f"Redis can't serve now: {FULL_REASON} (OOM)"))
            place += 1
        else:
            outcomes.append(too_many_reservations(check.debits[values[place + 1]][0]))
            place += 2
    return None


def _corrupt_bucket(check: Check, key: str | bytes) -> StoreCorrupt:
    """Names the limit, not the key: a key holds the subject, and errors are logged."""
    name = next(
        (rule.limit.name for rule, own, *_ in check.debits if key in (own, overflow_key(own, rule.overflow_suffix))),
        None,
    )
    return foreign_value_error(f"the bucket of limit {name!r}" if name else "the subject's overrides")


def foreign_value_error(what: str) -> StoreCorrupt:
    return StoreCorrupt(f"{what} holds a value that limitforge did not write; see who else uses this key prefix")


def split_by_weight(weights_us: Sequence[int]) -> Iterable[range]:
    """Which of these one call can take, in order."""
    first, busy_us = 0, 0
    for at, weight_us in enumerate(weights_us):
        if at > first and busy_us + weight_us > MAX_CALL_US:
            yield range(first, at)
            first, busy_us = at, 0
        busy_us += weight_us
    if weights_us:
        yield range(first, len(weights_us))


def batches_by_slot(checks: Sequence[Check], slot_of: SlotOf) -> Iterable[Sequence[Check]]:
    """The same for checks of one take each, from any slots."""
    for together in group_by_slot(checks, lambda check: slot_of(check.debits[0][1])):
        for part in split_by_weight([check.weight_us for check in together]):
            yield together[part.start : part.stop]


def single_call_flow(call: ScriptCall) -> Flow[Reply]:
    """A call whose reply is somebody else's affair."""
    return (yield call)


def with_encoded_strings(call: ScriptCall) -> ScriptCall:
    """The same with every string as bytes, for those whose escapes are no UTF-8."""
    keys, args = ([encode_key(s) if isinstance(s, str) else s for s in strings] for strings in (call.keys, call.args))
    return ScriptCall(keys, args, call.call_id, call.keys_per_slot)


def as_cross_slot(call: ScriptCall, slot_of: SlotOf) -> ScriptCall:
    """The same call over several slots, whose keys follow each other slot by slot."""
    lengths = [len(list(run)) for _, run in groupby(call.keys, slot_of)]
    return call._replace(keys_per_slot=tuple(lengths)) if len(lengths) > 1 else call
