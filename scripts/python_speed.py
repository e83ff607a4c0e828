"""Print the CPU time of this Python for work like that of the tests. `scripts/choose-python` runs it."""

import ast
import copy
import json
import time
from collections.abc import Iterator


class Bucket:
    def __init__(self, name: str, level: int) -> None:
        self.name, self.level = name, level

    def take(self, cost: int) -> bool:
        if cost > self.level:
            return False
        self.level -= cost
        return True


def checks(buckets: dict[str, Bucket]) -> Iterator[tuple[str, bool]]:
    for number in range(4_000):
        name = f"user:{number % 97}"
        yield name, buckets[name].take(number % 3)


def work() -> None:
    buckets = {f"user:{number}": Bucket(f"user:{number}", number) for number in range(97)}
    answers: dict[str, list[bool]] = {}
    for name, allowed in checks(buckets):
        answers.setdefault(name.upper(), []).append(allowed)
    known = json.loads(json.dumps(answers))
    copied = copy.deepcopy(known)
    tree = ast.parse("\n".join(f"def f{number}(a, b): return a + b * {number}" for number in range(80)))
    sum(isinstance(node, ast.Name) for node in ast.walk(tree))
    sorted(copied, key=lambda name: (len(copied[name]), name))


def seconds() -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


if __name__ == "__main__":
    print(min(seconds() for _ in range(6)))
