"""A check as a store takes it: takes (one rule, one key, one cost each) that decide together, all or nothing."""

import os
from collections.abc import Iterable, Mapping

import msgspec

from limitforge.core.exact import MAX_COUNT, cost_of
from limitforge.core.keys import MAX_BYTES, Keys, Place, text
from limitforge.core.limits import Limit, Mode
from limitforge.core.plan import MAX_LIMITS, Limits, LimitsLike, Plan, Rule, known_priority
from limitforge.errors import InvalidInput

TOKEN_BYTES = 8


class Entry(msgspec.Struct, frozen=True):
    """One limit with what it is asked for: gateways give each limit a resource, a subject and a cost of its own."""

    limit: Limit
    resource: str | bytes
    subject: str | bytes
    cost: int = 1
    place: Place = Place.POLICY


class Take(msgspec.Struct, gc=False):
    """What a check wants of one bucket. `overrides` is the key of its subject's overrides, None where those don't
    reach.
    """

    rule: Rule
    key: str
    cost: int
    resource: str
    overrides: str | None


class Hold(msgspec.Struct, frozen=True):
    """A check that reserves: its record's key and token, and what happens to it when nobody settles."""

    key: str
    token: bytes
    ttl_us: int
    refund: bool


class Check(msgspec.Struct, gc=False):
    """What decides together. `lease` is the token of the slots that it may take, `varies` tells that a rule depends
    on the time, `hold` makes it a reservation, `shadow` is a candidate plan that is judged beside it.
    """

    takes: list[Take]
    names: tuple[str, ...]
    lease: bytes = b""
    varies: bool = False
    hold: Hold | None = None
    shadow: "Check | None" = None

    def around(self, now_us: int) -> None:
        """Lay every quota's windows around a time."""
        for take in self.takes:
            take.rule = take.rule.around(now_us)


def check_of(
    keys: Keys,
    limits: LimitsLike,
    resource: str | bytes,
    subject: str | bytes,
    *,
    cost: int,
    costs: Mapping[str, int] | None,
    tenant: str | bytes,
    priority: str,
    shadow: LimitsLike | None,
) -> Check:
    """The simple form: one resource, one subject, and one cost for every limit (or one by name)."""
    if type(limits) is not Limits:
        limits = Limits.of(limits)
    if type(cost) is not int or not 0 <= cost <= MAX_COUNT:
        cost = cost_of("cost", cost)
    if type(resource) is not str or len(resource) > MAX_BYTES or not resource.isascii():
        resource = text("resource", resource)
    if type(subject) is not str or len(subject) > MAX_BYTES or not subject.isascii():
        subject = text("subject", subject)
    tenant_key = keys.tenant(tenant)
    check = _plan_check(keys, limits.plan(priority), resource, subject, cost, costs, tenant_key)
    if shadow is not None:
        candidate = Limits.of(shadow).plan(priority, Place.SHADOW)
        check.shadow = _plan_check(keys, candidate, resource, subject, cost, _named_in(costs, candidate), tenant_key)
        check.shadow.lease = check.lease = check.lease or check.shadow.lease
    return check


def _plan_check(
    keys: Keys, plan: Plan, resource: str, subject: str, cost: int, costs: Mapping[str, int] | None, tenant: str
) -> Check:
    overrides = f"{tenant}o:{subject}" if plan.overridable else None
    wanted = None if costs is None else _costs_by_name(costs, plan)
    takes = []
    base, scope = "", None
    for rule in plan.rules:
        if rule.scope is not scope:
            scope = rule.scope
            base = keys.bucket(scope, plan.place, tenant, resource, subject)
        key = base + rule.suffix
        this = cost if wanted is None else wanted.get(rule.limit.name, cost)
        takes.append(
            Take(
                rule.at(keys.unprefixed(key)) if rule.varies else rule,
                key,
                1 if rule.requests and this else this,
                resource,
                overrides if rule.overridable else None,
            )
        )
    return Check(takes, plan.names, os.urandom(TOKEN_BYTES) if plan.leases else b"", plan.varies)


def check_of_entries(keys: Keys, entries: Iterable[Entry], *, tenant: str | bytes, priority: str) -> Check:
    """The general form. Entries of the same limit and key are merged, their costs added."""
    known = known_priority(priority)
    tenant_key = keys.tenant(tenant)
    takes: dict[str, Take] = {}
    names: list[str] = []
    for at, entry in enumerate(entries):
        if not isinstance(entry, Entry):
            raise InvalidInput(f"entries[{at}]", f"must be an Entry, got {type(entry).__name__}")
        if entry.limit.mode is Mode.OFF:
            continue
        rule = Limits.of(entry.limit).plan(known, entry.place).rules[0]
        resource = text(f"entries[{at}].resource", entry.resource)
        subject = text(f"entries[{at}].subject", entry.subject)
        cost = cost_of(f"entries[{at}].cost", entry.cost)
        key = keys.bucket(rule.scope, entry.place, tenant_key, resource, subject) + rule.suffix
        same = takes.get(key)
        if same is None:
            overrides = keys.overrides(tenant_key, subject) if rule.overridable else None
            takes[key] = Take(rule.at(keys.unprefixed(key)) if rule.varies else rule, key, cost, resource, overrides)
            names.append(_reported(entry, names))
        elif same.rule.limit != entry.limit:
            raise InvalidInput(
                f"entries[{at}].limit", f"differs from an earlier limit called {entry.limit.name!r} with the same key"
            )
        else:
            same.cost += cost
            if same.cost > MAX_COUNT:
                raise InvalidInput(f"entries[{at}].cost", f"the costs of one bucket may add up to at most {MAX_COUNT}")
    if len(takes) > MAX_LIMITS:
        raise InvalidInput("entries", f"at most {MAX_LIMITS} buckets in one check, got {len(takes)}")
    for take in takes.values():
        if take.rule.requests and take.cost:
            take.cost = 1
    leases = any(take.rule.holds_lease for take in takes.values())
    varies = any(take.rule.varies for take in takes.values())
    return Check(list(takes.values()), tuple(names), os.urandom(TOKEN_BYTES) if leases else b"", varies)


_PLACES = {Place.OPERATOR: "operator", Place.TENANT: "tenant", Place.POLICY: "policy", Place.SHADOW: "shadow"}


def _reported(entry: Entry, names: list[str]) -> str:
    """The limit's own name if no earlier one has it, else with its place, else with a number."""
    name = entry.limit.name
    if name not in names:
        return name
    name = f"{_PLACES[entry.place]}:{name}"
    if name not in names:
        return name
    return next(numbered for n in range(2, len(names) + 3) if (numbered := f"{name}#{n}") not in names)


def _costs_by_name(costs: Mapping[str, int], plan: Plan) -> dict[str, int]:
    checked = {}
    for name, cost in costs.items():
        if name not in plan.known:
            known = ", ".join(sorted(plan.known)) or "none"
            raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name; there are {known}")
        checked[name] = cost_of(f"costs.{name}", cost)
    return checked


def _named_in(costs: Mapping[str, int] | None, plan: Plan) -> dict[str, int] | None:
    """A candidate plan need not have every limit that the live one has."""
    return None if costs is None else {name: cost for name, cost in costs.items() if name in plan.known}
