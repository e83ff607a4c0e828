"""How many are admitted when many callers ask at once for more than there is: speed without that does not count."""

import itertools
from dataclasses import dataclass

from bench.library.contest import Contestant, sizes_of
from bench.library.drive import drive

SUBJECT = "user:1"


@dataclass(frozen=True, slots=True)
class Admitted:
    count: int
    of: int

    def text(self) -> str:
        return f"{self.count} of {self.of}"


@dataclass(frozen=True, slots=True)
class Exactness:
    """`after` is what the first of several limits still admits when another one has denied: denials take nothing."""

    admitted: Admitted
    after: Admitted | None

    @property
    def exact(self) -> bool:
        return self.admitted.count == self.admitted.of and (self.after is None or self.after.count == self.after.of)


async def exactness(contestant: Contestant, url: str, limits: int, size: int, callers: int) -> Exactness:
    sizes = sizes_of(limits, size)
    more = size // 2
    door = await contestant.open(url, sizes)
    try:
        admitted, _ = await drive(door.ask, itertools.repeat(SUBJECT, size + more), callers)
        after = None
        if limits > 1 and door.first is not None:
            left = sizes[0] - size
            still, _ = await drive(door.first, itertools.repeat(SUBJECT, left + more), callers)
            after = Admitted(still, left)
        return Exactness(Admitted(admitted, size), after)
    finally:
        await door.close()
