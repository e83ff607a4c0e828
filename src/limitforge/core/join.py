"""Limits of several plans that decide together: the operator's, a tenant's, a policy's."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from limitforge.core.exact import short_repr
from limitforge.core.keys import Layer
from limitforge.core.limits import Limit, Mode, Priority
from limitforge.core.plan import MAX_LIMITS, Limits, LimitsLike, Plan, Rule, parse_priority
from limitforge.errors import InvalidInput, InvalidLimit

LAYER_NAMES = {Layer.OPERATOR: "operator", Layer.TENANT: "tenant", Layer.POLICY: "policy", Layer.SHADOW: "shadow"}
"""What a name may start with, before a colon, to say where its limit is; no limit's own name does."""
LAYER_WORDS = frozenset(LAYER_NAMES.values())


class PlanPart(NamedTuple):
    """The limits of one plan in its place; none of them is stronger than `mode`."""

    limits: LimitsLike
    layer: Layer
    mode: Mode = Mode.ON


def join_limits(*parts: PlanPart) -> Limits:
    """One set of limits out of several, each counted in its own place.

    They are reported, and may be given costs, by their names; where several have one name, by `operator:name`,
    `tenant:name` and `policy:name`. A cost for a bare name that several have is for all of these. Joining is cheap:
    what was compiled of the parts is used again.
    """
    return _JoinedLimits(tuple(_checked(at, part) for at, part in enumerate(parts)))


class _ValidPart(NamedTuple):
    limits: Limits
    layer: Layer
    mode: Mode


class _JoinedLimits(Limits):
    """Iterates over the limits as their parts have them, whatever mode the join gives them."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[_ValidPart, ...]) -> None:
        super().__init__()
        self._parts = parts
        self._limits = tuple(limit for part in parts for limit in part.limits)
        if len(self._limits) > MAX_LIMITS:
            raise InvalidLimit("limits", f"at most {MAX_LIMITS} in one check, got {len(self._limits)}")
        if len({place for _, place, _ in parts}) < len(parts):
            _refuse_twins(parts)

    def plan(self, priority: str, place: Layer = Layer.POLICY, mode: Mode = Mode.ON) -> Plan:
        """The plans of the parts as one, once per priority. There is none for another place, such as a shadow's: each
        part has its own.
        """
        if place is not Layer.POLICY or mode is not Mode.ON:
            raise InvalidLimit("limits", "joined limits have the places and modes of their parts, and no others")
        try:
            return self.plans[priority]
        except (KeyError, TypeError):
            known = parse_priority(priority)
        return self.plans.setdefault(known, _plan(self._parts, known))

    def all_on(self) -> Limits:
        return _JoinedLimits(tuple(_ValidPart(limits.all_on(), place, Mode.ON) for limits, place, _ in self._parts))

    def overridable(self, names: Collection[object]) -> Limits:
        """All but the operator's. An override does not say which place it means, so what it names must be unique; what
        is no collection of names is refused by whoever reads it next.
        """
        reach = [limit for limits, place, _ in self._parts if place is not Layer.OPERATOR for limit in limits]
        for name, count in Counter(limit.name for limit in reach).items():
            if count > 1 and isinstance(names, Collection) and name in names:
                raise InvalidInput(f"limits.{name}", "several of the joined plans have it, and would all be changed")
        return Limits(*{limit.name: limit for limit in reach}.values())

    def __getitem__(self, name: str) -> Limit:
        """By its name, if only one has it, or by its name with its place."""
        word, colon, rest = name.partition(":")
        placed = colon and word in LAYER_WORDS
        found = [
            limit
            for limits, place, _ in self._parts
            if not placed or LAYER_NAMES[place] == word
            for limit in limits
            if limit.name == (rest if placed else name)
        ]
        if len(found) != 1:
            raise KeyError(name)
        return found[0]

    def __repr__(self) -> str:
        return f"joined({', '.join(map(repr, self._parts))})"


def reported_names(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What is told of each (place, name): a unique name bare, another with its place; what is still not unique (one
    limit, several keys) with a number.
    """
    bare = Counter(name for _, name in named)
    if len(bare) == len(named):
        return tuple(bare)
    names: dict[str, None] = {}
    for place, own_name in named:
        name = first = own_name if bare[own_name] == 1 else f"{LAYER_NAMES[Layer(place)]}:{own_name}"
        number = 2
        while name in names:
            name = f"{first}#{number}"
            number += 1
        names[name] = None
    return tuple(names)


def aliases(name: str, place: Layer | None) -> tuple[str, ...]:
    """All that a limit which was reported as `name` may be called, the most exact first."""
    word, colon, bare = name.partition(":")
    if colon and word in LAYER_WORDS:
        return name, bare
    return (name,) if place is None else (f"{LAYER_NAMES[place]}:{name}", name)


def _checked(at: int, part: PlanPart) -> _ValidPart:
    limits, place, mode = part
    if not isinstance(place, Layer) or place is Layer.SHADOW:
        raise InvalidInput(
            f"parts[{at}].place", f"must be the operator's, a tenant's or a policy's, got {short_repr(place)}"
        )
    if not isinstance(mode, Mode):
        raise InvalidInput(f"parts[{at}].mode", f"must be a Mode, got {short_repr(mode)}")
    if isinstance(limits, _JoinedLimits):
        raise InvalidLimit("limits", "are joined already; join all parts at once")
    return _ValidPart(Limits.of(limits), place, mode)


def _refuse_twins(parts: Sequence[_ValidPart]) -> None:
    """Two limits of one name and place would share their bucket."""
    counted = Counter((place, limit.name) for limits, place, _ in parts for limit in limits)
    for (place, name), count in counted.items():
        if count > 1:
            raise InvalidLimit("limits", f"two limits of the {LAYER_NAMES[place]} are called {name!r}")


def _plan(parts: Sequence[_ValidPart], priority: Priority) -> Plan:
    rules: list[Rule] = []
    known: dict[str, tuple[int, ...]] = {}
    for limits, place, mode in parts:
        plan = limits.plan(priority, place, mode)
        for name, own in plan.indexes_by_name.items():
            found = tuple(len(rules) + at for at in own)
            for alias in (name, f"{LAYER_NAMES[place]}:{name}"):
                known[alias] = known.get(alias, ()) + found
        rules += plan.rules
    return Plan.from_rules(tuple(rules), reported_names([(rule.layer, rule.limit.name) for rule in rules]), known)
