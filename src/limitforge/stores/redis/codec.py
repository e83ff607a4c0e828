"""Encode checks into calls of the Lua script and decode its replies, without I/O.

Each operation is a flow (`script_call`), so that both stores share everything but the transport of the calls.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, cast

from limitforge.core.check import Check, ResultKind
from limitforge.core.decision import OVERFLOWED, CheckResult, CompactOutcome, Outcome, build_decision
from limitforge.core.evaluate import too_many_reservations
from limitforge.core.keys import lane_prefix_of, new_bucket_counter_key, overflow_key, override_index_of
from limitforge.core.limits import UNBUDGETED_SCOPES
from limitforge.core.plan import Rule
from limitforge.errors import LimitforgeError, StoreCorrupt
from limitforge.stores.errors import FULL_REASON, StoreFull
from limitforge.stores.redis.key_hints import KeyHints
from limitforge.stores.redis.multi_step.cross_slot import FinishHold
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.shares import TopUpReply, TopUpRequest
from limitforge.stores.redis.script_call import (
    Flow,
    Reply,
    ScriptCall,
    UnreplicatedReply,
    decode_reply,
    foreign_value_error,
    invalid_reply_error,
    make_call,
)
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot

# A local name is three times as fast as a member that is looked up on its enum.
_PART, _OUTCOME = ResultKind.PART, ResultKind.OUTCOME

MAX_CALL_US = 1_000  # estimated time for which one call may block Redis

# Operations of the script (lua/dispatch.lua); command_codec.py has the others.
CHECK, FINISH_HOLDS, TOP_UP, HEARTBEAT = 1, 10, 11, 12
# How the result of a check begins in the reply (lua/check.lua).
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

ScriptResult = Outcome | CompactOutcome | LimitforgeError
OnDenial = Callable[[Check, Outcome], None]
"""Called with each denial."""


def check_flow(
    checks: Sequence[Check],
    calendar_us: int,
    time_us: int,
    on_denial: OnDenial | None = None,
    override_hints: KeyHints | None = None,
    new_buckets: NewBucketBudget | None = None,
) -> Flow[list[CheckResult]]:
    """Evaluate checks in order, all in one call.

    `calendar_us` is the caller's time, for the windows of calendar quotas. `time_us` replaces the clock of Redis unless
    it is SERVER_TIME. Subjects without an override hint are first assumed to have no overrides. `new_buckets` bounds
    how many buckets a tenant may create.
    """
    all_checks = checks
    if any([check.shadow is not None for check in checks]):  # noqa: C419 - a list is twice as fast
        all_checks = [each for check in checks for each in (check, check.shadow) if each is not None]
    for check in all_checks:
        if check.is_dynamic:
            check.resolve_calendars(calendar_us)
    unreplicated: list[UnreplicatedReply] = []
    outcomes = yield from _run_script(all_checks, time_us, unreplicated, override_hints, new_buckets)
    shadows: dict[int, Outcome] = {}
    if all_checks is not checks:
        outcomes, shadows = _split_shadows(checks, outcomes)
    results: list[CheckResult] = []
    for index, (check, outcome) in enumerate(zip(checks, outcomes, strict=True)):
        result: CheckResult = outcome
        if unreplicated and _took_anything(check, outcome):
            result = unreplicated[0].to_error()
        elif isinstance(outcome, Outcome) and check.result_kind is not _PART:
            if new_buckets is not None and any(row[4] & OVERFLOWED for row in outcome.rows):
                new_buckets.count_overflow()
            if not outcome.allowed and on_denial is not None:
                on_denial(check, outcome)
            if check.result_kind is not _OUTCOME or index in shadows:
                result = build_decision(check, outcome, shadows.get(index))
        results.append(result)
    return results


def _took_anything(check: Check, result: ScriptResult) -> bool:
    is_allowed = isinstance(result, CompactOutcome) or (isinstance(result, Outcome) and result.allowed)
    return is_allowed and any(cost for _, _, cost, *_ in check.debits)


def _split_shadows(
    checks: Sequence[Check], results: Sequence[ScriptResult]
) -> tuple[list[ScriptResult], dict[int, Outcome]]:
    """Separate the results of the live plans from those of the shadow plans, by position.

    An error of a shadow plan must not affect the live plan, so it is dropped.
    """
    remaining = iter(results)
    outcomes: list[ScriptResult] = []
    shadows: dict[int, Outcome] = {}
    for index, check in enumerate(checks):
        outcomes.append(next(remaining))
        if check.shadow is not None and isinstance(shadow := next(remaining), Outcome):
            shadows[index] = shadow
    return outcomes, shadows


def finish_flow(finishes: Sequence[FinishHold], time_us: int) -> Flow[list[Any]]:
    """Finish holds in one call. Return the reply to each, as in `FinishHold`."""
    keys: dict[str, int] = {}
    strings: dict[str | bytes, int] = {}
    encoded: list[int] = []
    for finish in finishes:
        key_indexes = [keys.setdefault(key, len(keys) + 1) for key in finish.keys]
        token = strings.setdefault(finish.token, len(strings) + 2)
        encoded += (
            finish.action,
            token,
            finish.ttl_us,
            int(finish.refunds_on_lapse),
            finish.lapses_us,
            len(key_indexes),
        )
        encoded += [
            -index if may_be_missing else index
            for index, may_be_missing in zip(key_indexes, finish.may_be_missing, strict=True)
        ]
        encoded += finish.amounts
        encoded += (source for source, _ in finish.sources)
        encoded += (starts for _, starts in finish.sources)
    call = make_call((FINISH_HOLDS, time_us, encoded), list(keys), strings)
    values = iter(decode_reply(call, (yield call)))
    return [[(next(values), next(values)) for _ in finish.keys] if next(values) else None for finish in finishes]


def top_up_flow(
    requests: Sequence[TopUpRequest],
    calendar_us: int,
    time_us: int,
    lapse_us: int,
    new_buckets: NewBucketBudget | None = None,
) -> Flow[list[TopUpReply | None]]:
    """Top up and return prepaid shares, all in one call. A reply is None if the script did nothing for its request."""
    keys: dict[str, int] = {}
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}
    encoded: list[int] = []
    for request in requests:
        share = request.share
        encoded += (
            rules.setdefault(share.rule.with_calendar_at(calendar_us), len(rules) + 1),
            keys.setdefault(share.key, len(keys) + 1),
        )
        encoded.append(0 if share.overrides is None else keys.setdefault(share.overrides, len(keys) + 1))
        encoded += (strings.setdefault(name, len(strings) + 2) for name in (share.resource, share.token))
        encoded += (request.returned, *share.window, request.kept, request.requested, lapse_us)
    arguments: tuple[Any, ...] = (TOP_UP, time_us, [rule.script_args for rule in rules], encoded)
    counters: list[str] = []
    if new_buckets is not None:
        counters = list({new_bucket_counter_key(lane_prefix_of(request.share.key)): None for request in requests})
        arguments = (*arguments, [new_buckets.per_minute, *(0 for _ in counters)])
    call = make_call(arguments, [*keys, *counters], strings)
    values = decode_reply(call, (yield call))
    rows = [values[start : start + 7] for start in range(1, len(values), 7)]
    return [TopUpReply(*numbers) if status == 1 else None for status, *numbers in rows]


def heartbeat_flow(key: str, name: bytes, alive_us: int, time_us: int) -> Flow[int]:
    """Mark a process as alive for `alive_us` (0: remove it); return how many processes are alive."""
    call = make_call((HEARTBEAT, time_us, alive_us), [key], [name])
    return decode_reply(call, (yield call))[0]


def _run_script(
    checks: Sequence[Check],
    time_us: int,
    unreplicated: list[UnreplicatedReply],
    override_hints: KeyHints | None,
    new_buckets: NewBucketBudget | None,
) -> Flow[list[ScriptResult]]:
    """Evaluate checks in order, with one call or several.

    The script stops at a check that needs other calendar windows, override keys, or overflow buckets. The checks after
    it depend on what it takes, so it and all later checks are sent again, from then on with all override keys.
    """
    outcomes: list[ScriptResult] = []
    repeats = 0
    remaining, hints, with_overflow_keys = checks, override_hints, False
    while True:
        call = encode_checks(remaining, time_us, hints, new_buckets, with_overflow_keys=with_overflow_keys)
        values = decode_reply(call, _unwrap_reply((yield call), unreplicated))
        missing = _decode_outcomes(remaining, call, values, outcomes)
        if missing is not None:
            status, key = missing
            if status == NEEDS_OVERFLOW_KEYS and new_buckets is not None:
                new_buckets.exhausted_counters.add(key)
                with_overflow_keys = True  # for all lanes, since others of this batch may need them too
            elif override_hints is not None:
                override_hints.add(key)
        if len(outcomes) == len(checks):
            return outcomes
        remaining, hints = checks[len(outcomes) :], None
        repeats += 1
        if repeats > 3 * sum(len(check.debits) for check in checks) + 1:
            return outcomes + [StoreCorrupt("the script asked for the same check too often")] * len(remaining)


def _unwrap_reply(reply: Reply, unreplicated: list[UnreplicatedReply]) -> Reply:
    """Return the reply itself. Add it to `unreplicated` if too few replicas confirmed it."""
    if not isinstance(reply, UnreplicatedReply):
        return reply
    unreplicated.append(reply)
    inner: Reply = reply.reply
    return inner


def encode_checks(  # noqa: C901, PLR0912, PLR0915 - the hot path: one loop, and no avoidable function call
    checks: Sequence[Check],
    time_us: int,
    override_hints: KeyHints | None = None,
    new_buckets: NewBucketBudget | None = None,
    *,
    with_overflow_keys: bool = False,
) -> ScriptCall:
    """Encode checks into one call, with each key, rule and string once.

    Without `override_hints` every subject may have overrides. `with_overflow_keys` adds the overflow buckets of all
    lanes.
    """
    keys: dict[str, int] = {}  # position in KEYS, from 1
    rules: dict[Rule, int] = {}
    strings: dict[str | bytes, int] = {}  # position in ARGV, from 2: the first is the encoded request
    index_keys: dict[str, int] = {}  # position of each override index; 0 if override keys are sent instead
    encoded: list[int] = []
    counters: dict[str, bool] = {}  # by counter key of a lane: whether its overflow buckets are sent
    overflowing: list[str] = []
    overflow: list[int] = []  # pairs: position of a bucket, position of its overflow bucket

    def add_counter(lane_prefix: str) -> bool:
        """Send the counter of a lane; return whether its overflow buckets are sent, too."""
        counter = new_bucket_counter_key(lane_prefix)
        if counter not in counters:
            counters[counter] = with_overflow_keys or (
                new_buckets is not None and counter in new_buckets.exhausted_counters
            )
            overflowing.extend([counter] if counters[counter] else [])
        return counters[counter]

    def add_override_index(index_key: str) -> int:
        """Send an override index, and return its position; or return 0 if override keys are to be sent instead."""
        has_overrides = override_hints is None or index_key in override_hints
        if new_buckets is not None and add_counter(lane_prefix_of(index_key)):
            has_overrides = True  # take the general path, which adds the overflow buckets
        position = index_keys[index_key] = 0 if has_overrides else keys.setdefault(index_key, len(keys) + 1)
        return position

    for check in checks:
        prepared, lease, hold = check.prepared, check.lease, check.hold
        if prepared is not None and hold is None and not lease:  # the fast path, which nearly all checks take
            override_index_position = index_keys.get(prepared.override_index_key)
            if override_index_position is None:
                override_index_position = add_override_index(prepared.override_index_key)
            if override_index_position:
                prefix, cost, uniform_rules = check.bucket_prefix, check.cost, prepared.plan.uniform_rules
                encoded += (len(uniform_rules), 0, 0)
                for rule, suffix, counts_requests, overridable in uniform_rules:
                    encoded += (
                        rules.setdefault(rule, len(rules) + 1),
                        keys.setdefault(prefix + suffix, len(keys) + 1),
                        1 if counts_requests and cost else cost,
                        override_index_position if overridable else 0,
                        0,
                    )
                continue
        debits = check.debits
        token = strings.setdefault(lease, len(strings) + 2) if lease else 0
        if hold is None:
            encoded += (len(debits), token, 0)
        else:
            record = keys.setdefault(hold.key, len(keys) + 1) if hold.key else -1
            refund = int(hold.refund) + 2 * hold.uses_tentative_ttl
            encoded += (
                len(debits),
                token,
                record,
                strings.setdefault(hold.token, len(strings) + 2),
                hold.ttl_us,
                refund,
            )
        last_overrides: str | None = None
        last_resource: object = None
        override_position = resource_position = 0
        for rule, key, cost, resource, overrides in debits:
            # A bucket must precede its overrides in KEYS.
            rule_position, key_position = rules.setdefault(rule, len(rules) + 1), keys.setdefault(key, len(keys) + 1)
            if overrides is None:
                encoded += (rule_position, key_position, cost, 0, 0)
                if new_buckets is not None and rule.scope not in UNBUDGETED_SCOPES:
                    add_counter(lane_prefix_of(key))
            else:
                if overrides is not last_overrides or resource is not last_resource:
                    last_overrides, last_resource = overrides, resource
                    index_key = override_index_of(overrides)
                    known = index_keys.get(index_key)
                    override_position = add_override_index(index_key) if known is None else known
                    resource_position = 0
                    if not override_position:
                        override_position = keys.setdefault(overrides, len(keys) + 1)
                        resource_position = strings.setdefault(resource, len(strings) + 2)
                encoded += (rule_position, key_position, cost, override_position, resource_position)
            if overflowing and rule.scope not in UNBUDGETED_SCOPES and add_counter(lane_prefix_of(key)):
                shared = overflow_key(key, rule.overflow_suffix)
                overflow += (key_position, keys.setdefault(shared, len(keys) + 1))
    rule_rows = [rule.script_args for rule in rules]
    if new_buckets is None:
        return make_call((CHECK, time_us, rule_rows, encoded), list(keys), strings)
    budget = [new_buckets.per_minute, *map(int, counters.values())]
    return make_call((CHECK, time_us, rule_rows, encoded, budget, overflow), [*keys, *counters], strings)


def _decode_outcomes(
    checks: Sequence[Check], call: ScriptCall, values: list[int], outcomes: list[ScriptResult]
) -> tuple[int, str] | None:
    """Append the results in the reply to `outcomes`, up to a check that must be sent again.

    Return the status of that check and the key that it needs. Return None if all results were appended, or if it needed
    only other calendar windows, which it has now.
    """
    if len(values) <= len(checks) and not {NEEDS_CALENDAR, NEEDS_OVERRIDES, NEEDS_OVERFLOW_KEYS}.intersection(values):
        raise invalid_reply_error()
    now_us, offset = values[0], 1
    for check in checks:
        status, prepared = values[offset], check.prepared
        debit_count = len(check.debits) if prepared is None else len(prepared.plan.uniform_rules)
        if status == ALLOWED_PLAIN:
            start, offset = offset + 1, offset + 1 + 2 * debit_count
            outcome = CompactOutcome(now_us, values[start:offset])
            stays_compact = check.result_kind is _OUTCOME and check.shadow is None
            outcomes.append(outcome if stays_compact else outcome.expand(check))
        elif status <= ALLOWED:
            start, offset = offset + 2, offset + 2 + 5 * debit_count
            rows: Any
            if debit_count == 1:
                rows = [values[start:offset]]
            elif debit_count == 2:
                rows = [values[start : start + 5], values[start + 5 : offset]]
            else:
                rows = [values[row : row + 5] for row in range(start, offset, 5)]
            outcomes.append(Outcome(now_us, status == ALLOWED, values[start - 1], rows))
        elif status == NEEDS_CALENDAR:
            check.resolve_calendar(values[offset + 1], values[offset + 2])
            return None
        elif status in (NEEDS_OVERRIDES, NEEDS_OVERFLOW_KEYS):
            return status, cast("str", call.keys[values[offset + 1] - 1])
        elif status == CORRUPT:
            outcomes.append(_corrupt_bucket(check, call.keys[values[offset + 1] - 1]))
            offset += 2
        elif status == NOT_WRITTEN:
            outcomes.append(StoreFull(f"Redis can't serve now: {FULL_REASON} (OOM)"))
            offset += 1
        else:
            outcomes.append(too_many_reservations(check.debits[values[offset + 1]][0]))
            offset += 2
    return None


def _corrupt_bucket(check: Check, key: str | bytes) -> StoreCorrupt:
    """Return an error that names the limit but not the key: a key contains the subject, and errors are logged."""
    name = next(
        (
            rule.limit.name
            for rule, bucket, *_ in check.debits
            if key in (bucket, overflow_key(bucket, rule.overflow_suffix))
        ),
        None,
    )
    return foreign_value_error(f"the bucket of limit {name!r}" if name else "the subject's overrides")


def split_by_weight(weights_us: Sequence[int]) -> Iterable[range]:
    """Split a batch into consecutive ranges that each fit into one call."""
    start, total_us = 0, 0
    for index, weight_us in enumerate(weights_us):
        if index > start and total_us + weight_us > MAX_CALL_US:
            yield range(start, index)
            start, total_us = index, 0
        total_us += weight_us
    if weights_us:
        yield range(start, len(weights_us))


def batches_by_slot(checks: Sequence[Check], slot_of: SlotOf) -> Iterable[Sequence[Check]]:
    """Split checks of one debit each into batches for one call, each within one slot."""
    for same_slot in group_by_slot(checks, lambda check: slot_of(check.debits[0][1])):
        for part in split_by_weight([check.weight_us for check in same_slot]):
            yield same_slot[part.start : part.stop]


def as_multi_slot(call: ScriptCall, slot_of: SlotOf) -> ScriptCall:
    """Return the call with its number of keys per slot. Keys of the same slot must be adjacent."""
    lengths = [len(list(run)) for _, run in groupby(call.keys, slot_of)]
    return call._replace(keys_per_slot=tuple(lengths)) if len(lengths) > 1 else call
