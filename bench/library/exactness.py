"""How many are admitted when many callers ask at once for more than there is: speed without that does not count."""

import itertools
from dataclasses import dataclass

from bench.library.contestants import Contestant, limit_sizes
from bench.library.load import run_callers

SUBJECT = "user:1"


@dataclass(frozen=True, slots=True)
class Admitted:
    count: int
    expected: int

    def text(self) -> str:
        return f"{self.count} of {self.expected}"


@dataclass(frozen=True, slots=True)
class Exactness:
    """`after` is what the first of several limits still admits when another one has denied: denials take nothing."""

    admitted: Admitted
    admitted_after_denial: Admitted | None

    @property
    def is_exact(self) -> bool:
        return self.admitted.count == self.admitted.expected and (
            self.admitted_after_denial is None
            or self.admitted_after_denial.count == self.admitted_after_denial.expected
        )


async def exactness(contestant: Contestant, url: str, limits: int, size: int, callers: int) -> Exactness:
    sizes = limit_sizes(limits, size)
    more = size // 2
    door = await contestant.open(url, sizes)
    try:
        admitted, _ = await run_callers(door.check, itertools.repeat(SUBJECT, size + more), callers)
        after = None
        if limits > 1 and door.check_first_limit is not None:
            left = sizes[0] - size
            still, _ = await run_callers(door.check_first_limit, itertools.repeat(SUBJECT, left + more), callers)
            after = Admitted(still, left)
        return Exactness(Admitted(admitted, size), after)
    finally:
        await door.close()
