"""Count the admitted checks when many concurrent callers exceed a limit: speed only counts if this is exact."""

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
    """`admitted_after_denial` is what the first limit still admits after another one has denied: a denial takes
    nothing.
    """

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
    open_limiter = await contestant.open(url, sizes)
    try:
        admitted, _ = await run_callers(open_limiter.check, itertools.repeat(SUBJECT, size + more), callers)
        after = None
        if limits > 1 and open_limiter.check_first_limit is not None:
            left = sizes[0] - size
            still, _ = await run_callers(
                open_limiter.check_first_limit, itertools.repeat(SUBJECT, left + more), callers
            )
            after = Admitted(still, left)
        return Exactness(Admitted(admitted, size), after)
    finally:
        await open_limiter.close()
