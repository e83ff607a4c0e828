"""The overrides of the memory store."""

from collections.abc import Container
from dataclasses import dataclass

from limitforge.core.algorithms.steps import Steps
from limitforge.core.decide import StepsFor
from limitforge.core.keys import Keys, decoded, encoded
from limitforge.core.overrides import (
    ANY_RESOURCE,
    Compiled,
    Override,
    OverridePage,
    applied,
    cursor_after,
    expires_at,
    subject_after,
    too_many,
)
from limitforge.core.plan import Rule
from limitforge.errors import StoreUnavailable
from limitforge.stores.protocol import (
    ClearOverrides,
    DeleteOverride,
    GetOverrides,
    ListOverrides,
    MissingOverrides,
    SetOverride,
)


@dataclass(frozen=True, slots=True)
class _Override:
    changes: dict[str, object]
    compiled: tuple[Compiled, ...]
    expires_us: int


class MemoryOverrides:
    """Overrides by subject and resource. They are never evicted: when there are too many, new ones are refused."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.found: dict[str, dict[str, _Override]] = {}  # by override key, then resource; empty for most
        self._subjects: dict[str, set[str]] = {}  # by what the keys of a lane start with

    def steps_at(self, now_us: int, shared: Container[tuple[Rule, str | None]] = ()) -> StepsFor:
        """The rule's own numbers, or those of the most specific live override that names its limit.

        `shared` are rules, with the overrides of who asks, that an overflow bucket decides: subjects share its window
        and its rate.
        """

        def live(found: dict[str, _Override], resource: str, rule: Rule) -> Compiled | None:
            override = found.get(resource)
            if override is None or now_us >= override.expires_us:
                return None
            named = (one for one in override.compiled if one.name == rule.limit.name and one.code == rule.steps.code)
            return next(named, None)

        def steps_for(rule: Rule, resource: str, overrides: str) -> Steps:
            found = self.found.get(overrides)
            if not found:
                return rule.steps
            exact = None if resource == ANY_RESOURCE else live(found, resource, rule)
            steps = applied(rule.steps, rule.scope, exact, live(found, ANY_RESOURCE, rule))
            if (rule, overrides) in shared:
                return rule.steps.overridden((steps.limit,))
            return steps

        return steps_for

    def set(self, command: SetOverride, now_us: int) -> Override:
        key = Keys.overrides(command.own, command.subject)
        found = {r: o for r, o in self.found.get(key, {}).items() if o.expires_us > now_us}
        too_many(len(found.keys() | {command.resource}))
        if key not in self.found:
            self._make_room(now_us)
        expires_us = now_us + command.ttl_us
        found[command.resource] = _Override(command.changes, command.compiled, expires_us)
        self.found[key] = found
        self._subjects.setdefault(command.own, set()).add(command.subject)
        return Override(command.tenant, command.resource, command.subject, command.changes, expires_at(expires_us))

    def get(self, command: GetOverrides, now_us: int) -> list[Override]:
        return self._live(command.own, command.tenant, command.subject, now_us)

    def page(self, command: ListOverrides, now_us: int) -> OverridePage:
        after = subject_after(command.cursor)
        subjects = sorted(
            (encoded(subject), own)
            for own in command.lanes
            for subject in self._subjects.get(own, ())
            if after is None or encoded(subject) > after
        )
        page = subjects[: command.subjects]
        overrides = [o for s, own in page for o in self._live(own, command.tenant, decoded(s), now_us)]
        return OverridePage(overrides, cursor_after(page[-1][0]) if len(subjects) > len(page) else None)

    def missing(self, command: MissingOverrides, now_us: int) -> list[int]:
        def is_live(own: str, resource: str, subject: str) -> bool:
            found = self.found.get(Keys.overrides(own, subject), {}).get(resource)
            return found is not None and now_us < found.expires_us

        return [at for at, place in enumerate(command.places) if not is_live(*place)]

    def delete(self, command: DeleteOverride, now_us: int) -> bool:
        live = {o.resource for o in self._live(command.own, "", command.subject, now_us)}
        doomed = live & {command.resource}
        key = Keys.overrides(command.own, command.subject)
        for resource in doomed:
            del self.found[key][resource]
        self._live(command.own, "", command.subject, now_us)
        return bool(doomed)

    def clear(self, command: ClearOverrides, now_us: int) -> int:
        cleared = 0
        for own in command.lanes:
            for subject in list(self._subjects.get(own, ())):
                cleared += bool(self._live(own, "", subject, now_us))
                self.found.pop(Keys.overrides(own, subject), None)
            self._subjects.pop(own, None)
        return cleared

    def _live(self, own: str, tenant: str, subject: str, now_us: int) -> list[Override]:
        """A subject's overrides, by resource; those that have expired are dropped on the way."""
        key = Keys.overrides(own, subject)
        found = {r: o for r, o in self.found.get(key, {}).items() if o.expires_us > now_us}
        if found:
            self.found[key] = found
        else:
            self.found.pop(key, None)
            subjects = self._subjects.get(own, set())
            subjects.discard(subject)
            if not subjects:
                self._subjects.pop(own, None)
        return [
            Override(tenant, resource, subject, override.changes, expires_at(override.expires_us))
            for resource, override in sorted(found.items(), key=lambda item: encoded(item[0]))
        ]

    def _make_room(self, now_us: int) -> None:
        if len(self.found) >= self._max_keys:
            for own, subjects in list(self._subjects.items()):
                for subject in list(subjects):
                    self._live(own, "", subject, now_us)
            if len(self.found) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds overrides of {self._max_keys} subjects; raise max_keys"
                )
