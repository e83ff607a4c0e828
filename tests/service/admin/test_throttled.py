"""The list of throttled subjects: fair, summed over workers, and without plain names in responses or files."""

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.core.clock import ManualClock
from limitforge.service.counters.throttled import MAX_SUBJECTS, WINDOW_US, ThrottledTracker
from limitforge.service.counters.window_files import MAX_FILE_BYTES
from tests.servers import RedisServer
from tests.service.live_service import PEPPERS, START_SECONDS, AdminClient, TenantFixture
from tests.service.program import RunningService
from tests.service.seeded_service import SeededService, run_seeded_service

NOW = 1_700_000_040_000_000 - 1_700_000_040_000_000 % WINDOW_US


def new_tracker(
    folder: Path | None = None, peppers: str = PEPPERS, clock: ManualClock | None = None
) -> ThrottledTracker:
    return ThrottledTracker(Peppers.parse(peppers), folder, clock or ManualClock(NOW))


async def write_files(throttled: ThrottledTracker) -> None:
    """Write the counts to the folder, as a worker does at shutdown."""
    await throttled.start()
    await throttled.close()


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def denials(throttled: ThrottledTracker, now_us: int = NOW, **wanted: str) -> dict[tuple[str, str], int]:
    found = await throttled.top(1_000, now_us, **wanted)
    return {(each.tenant_id, each.subject_hash): each.denied for each in found}


# --- One process -----------------------------------------------------------------------------------------------------


async def test_few_subjects_are_counted_exactly() -> None:
    throttled = new_tracker()
    for index in range(30):
        throttled.record_denial("ten_a", f"user:{index % 3}", NOW + index)
    top = await throttled.top(10, NOW + 30)
    assert [(each.subject_hash, each.denied) for each in top] == [
        (throttled.subject_hash("ten_a", f"user:{number}"), 10) for number in (2, 1, 0)
    ]
    assert top[0].last_denied_at.timestamp() * 1_000_000 >= NOW


async def test_old_denials_are_forgotten() -> None:
    throttled = new_tracker()
    throttled.record_denial("ten_a", "user:1", NOW)
    assert len(await throttled.top(10, NOW + WINDOW_US)) == 1
    throttled.record_denial("ten_a", "user:2", NOW + WINDOW_US)
    assert [each.denied for each in await throttled.top(10, NOW + WINDOW_US + 1)] == [1, 1]
    assert len(await throttled.top(10, NOW + 2 * WINDOW_US)) == 1
    assert await throttled.top(10, NOW + 4 * WINDOW_US) == []


async def test_a_clock_that_is_set_back_does_not_stop_the_list() -> None:
    throttled = new_tracker()
    throttled.record_denial("ten_a", "user:1", NOW + 60 * WINDOW_US)
    throttled.record_denial("ten_a", "user:2", NOW)
    assert await denials(throttled) == {("ten_a", throttled.subject_hash("ten_a", "user:2")): 1}
    assert await denials(throttled, NOW + 2 * WINDOW_US) == {}


async def test_one_tenant_can_not_crowd_out_another() -> None:
    throttled = new_tracker()
    for index in range(3):
        throttled.record_denial("ten_b", f"user:{index}", NOW)
    for index in range(100_000):
        throttled.record_denial("ten_a", f"user:{index}", NOW)
    for found in (await denials(throttled, tenant_id="ten_b"), await denials(throttled)):
        assert {name: count for name, count in found.items() if name[0] == "ten_b"} == {
            ("ten_b", throttled.subject_hash("ten_b", f"user:{index}")): 1 for index in range(3)
        }


async def test_ten_thousand_tenants_are_bounded_and_long_subjects_take_no_more_memory() -> None:
    throttled = new_tracker()
    for index in range(10_000):
        throttled.record_denial(f"ten_{index}", f"{index}-" + "x" * 500, NOW)
    for window in (throttled._current, throttled._previous):
        assert sum(len(names) for names in window.groups.values()) <= MAX_SUBJECTS
        assert all(len(name) <= 64 for names in window.groups.values() for name in names)
    found = await throttled.top(1_000, NOW, subject="9999-" + "x" * 500)
    assert [each.tenant_id for each in found] == ["ten_9999"]


# --- Hashes ----------------------------------------------------------------------------------------------------------


async def test_a_hash_depends_on_the_pepper_and_on_the_tenant() -> None:
    subjects = ["user:42", "203.0.113.7", "é" * 300, "\ud800"]
    for subject in subjects:
        hashes = [
            new_tracker(peppers=peppers).subject_hash(tenant_id, subject)
            for peppers in (PEPPERS, "1:another pepper of these tests")
            for tenant_id in ("ten_a", "ten_b")
        ]
        plain = sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()
        assert len({*hashes, plain[:16]}) == 5
        assert {len(each) for each in hashes} == {16}
    rotated = new_tracker(peppers=f"{PEPPERS},2:another pepper of these tests")
    assert rotated.subject_hash("ten_a", "user:42") != new_tracker().subject_hash("ten_a", "user:42")


async def test_a_known_subject_is_found_by_its_name() -> None:
    throttled = new_tracker()
    for subject in ("user:1", "user:2", "x" * 512):
        throttled.record_denial("ten_a", subject, NOW)
        throttled.record_denial("ten_b", subject, NOW)
        for each in ("ten_a", "ten_b"):
            expected = {(each, throttled.subject_hash(each, subject)): 1}
            assert await denials(throttled, subject=subject, tenant_id=each) == expected
        assert len(await denials(throttled, subject=subject)) == 2
    assert await denials(throttled, subject="user:3") == {}


def test_the_api_shows_hashes_that_can_not_be_computed_without_the_pepper(
    account: TenantFixture, tenant_admin: AdminClient
) -> None:
    for _ in range(7):
        account.check("user:7")
    items = tenant_admin.get("/throttled", subject="user:7").json()["items"]
    assert [(item["tenant_id"], item["denied"]) for item in items] == [(account.id, 4)]
    assert items[0]["subject_hash"] != sha256(b"user:7").hexdigest()[:16]
    other = TenantFixture(account.admin)
    for _ in range(4):
        other.check("user:7")
    theirs = other.tenant_admin().get("/throttled").json()["items"]
    assert [item["tenant_id"] for item in theirs] == [other.id]
    assert theirs[0]["subject_hash"] != items[0]["subject_hash"]


# --- Several workers -------------------------------------------------------------------------------------------------


async def test_workers_of_one_folder_are_added(tmp_path: Path) -> None:
    one, two = new_tracker(tmp_path), new_tracker(tmp_path)
    for throttled, times in ((one, 3), (two, 4)):
        for _ in range(times):
            throttled.record_denial("ten_a", "user:1", NOW)
        throttled.record_denial("ten_b", f"user:{times}", NOW + WINDOW_US)
    await write_files(one)
    await write_files(two)
    for throttled in (one, two, new_tracker(tmp_path)):
        expected = {("ten_a", "user:1"): 7, ("ten_b", "user:3"): 1, ("ten_b", "user:4"): 1}
        hashed = {(each, throttled.subject_hash(each, subject)): n for (each, subject), n in expected.items()}
        assert await denials(throttled, NOW + WINDOW_US) == hashed
        assert len(await denials(throttled, NOW + WINDOW_US, tenant_id="ten_b")) == 2
        assert len(await denials(throttled, NOW + WINDOW_US, subject="user:3")) == 1
        assert await denials(new_tracker(tmp_path), NOW + 3 * WINDOW_US) == {}


async def test_files_are_written_after_changes_and_removed_when_they_expire(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    throttled = new_tracker(tmp_path, clock=clock)
    await write_files(throttled)
    assert files(tmp_path) == []
    throttled.record_denial("ten_a", "user:1", NOW)
    await write_files(throttled)
    (file,) = files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.stat()
    await write_files(throttled)
    assert file.stat().st_ino == before.st_ino
    (tmp_path / f"{file.name}.new").write_bytes(b"of a worker that was killed meanwhile")
    clock.set_us(NOW + 2 * WINDOW_US)
    await write_files(throttled)
    assert files(tmp_path) == []


async def test_no_subject_is_on_disk(tmp_path: Path) -> None:
    throttled = new_tracker(tmp_path)
    throttled.record_denial("ten_a", "user:an-unmistakable-name", NOW)
    await write_files(throttled)
    (file,) = files(tmp_path)
    assert b"unmistakable" not in file.read_bytes()
    assert b"ten_a" in file.read_bytes()


async def test_a_full_part_fits_into_the_bound(tmp_path: Path) -> None:
    throttled = new_tracker(tmp_path)
    for index in range(MAX_SUBJECTS):
        throttled.record_denial(f"ten_{index:016d}", "user:1", NOW)
    await write_files(throttled)
    (file,) = files(tmp_path)
    assert file.stat().st_size < MAX_FILE_BYTES
    assert len(await new_tracker(tmp_path).top(1_000, NOW)) == 1_000


WRONG = {
    "empty": b"",
    "half": msgspec.msgpack.encode({"ten_a": [(b"12345678", 3, NOW)]})[:-4],
    "nonsense": b"\xc1" * 100,
    "not a map": msgspec.msgpack.encode([1, 2]),
    "rows of another kind": msgspec.msgpack.encode({"ten_a": [("user:1", 3)]}),
    "short hash": msgspec.msgpack.encode({"ten_a": [(b"1", 3, NOW)]}),
    "negative count": msgspec.msgpack.encode({"ten_a": [(b"12345678", -3, NOW)]}),
    "time of another window": msgspec.msgpack.encode({"ten_a": [(b"12345678", 3, 2**62)]}),
    "huge": msgspec.msgpack.encode({"ten_a": [(b"12345678", 3, NOW)] * 100_000}),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
async def test_an_invalid_file_is_ignored_and_logged_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = new_tracker(tmp_path)
    good.record_denial("ten_a", "user:1", NOW)
    await write_files(good)
    for name in ("wrong", "another"):
        (tmp_path / f"throttled-{NOW // WINDOW_US}-{name}").write_bytes(content)
    (tmp_path / f"throttled-{NOW // WINDOW_US}-folder").mkdir()
    (tmp_path / "throttled-what-is-this").write_bytes(content)
    reader = new_tracker(tmp_path)
    for _ in range(3):
        assert list((await denials(reader)).values()) == [1]
    assert len([each for each in caplog.records if "throttled.file_ignored" in each.message]) == 1


async def test_a_missing_folder_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    throttled = new_tracker(folder)
    throttled.record_denial("ten_a", "user:1", NOW)
    await write_files(throttled)
    assert [each.message.split(":")[0] for each in caplog.records] == ["throttled.write_failed"]
    assert len(await denials(throttled)) == 1
    folder.mkdir()
    await write_files(throttled)
    assert len(await denials(new_tracker(folder))) == 1


async def test_a_full_window_is_hashed_in_slices(tmp_path: Path) -> None:
    """The event loop can run other tasks between the slices, instead of waiting for thousands of HMACs."""
    throttled = new_tracker(tmp_path)
    for index in range(MAX_SUBJECTS):
        throttled.record_denial("ten_a", f"user:{index}", NOW)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await write_files(throttled)
    counting.cancel()
    assert turns >= 10


# --- The program -----------------------------------------------------------------------------------------------------


def workers(service: RunningService) -> list[int]:
    pid = service.process.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def only(worker: int, service: RunningService) -> Iterator[None]:
    """Pause the other workers, so that this one handles all requests."""
    others = [each for each in workers(service) if each != worker]
    for each in others:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in others:
            os.kill(each, signal.SIGCONT)


def eventually(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def pair(tmp_path: Path, redis_url: str, redis_server: RedisServer) -> Iterator[SeededService]:
    """`serve --workers 2` with Redis."""
    with run_seeded_service(f"sqlite:///{tmp_path}/pair.db", redis_url, "--workers", "2") as service:
        eventually(lambda: len(workers(service.running)) == 2)
        yield service


def test_any_worker_lists_the_denials_of_all(pair: SeededService) -> None:
    tenant = pair.tenant({"name": "a", "algorithm": "fixed_window", "limit": 1, "window_seconds": 3_600})

    def denied() -> list[int]:
        answer = pair.admin("GET", f"throttled?tenant_id={tenant.id}&subject=user:42")
        return [item["denied"] for item in answer.json["items"]]

    assert tenant.check().status == 200
    for worker, times in zip(workers(pair.running), (3, 4), strict=True):
        with only(worker, pair.running):
            assert [tenant.check().status for _ in range(times)] == [429] * times

    def lists_both(worker: int) -> bool:
        with only(worker, pair.running):
            return denied() == [7]

    eventually(lambda: all(lists_both(worker) for worker in workers(pair.running)))
    old = set(workers(pair.running))
    pair.running.process.send_signal(signal.SIGHUP)  # the counts of stopped workers remain until their window ends
    eventually(lambda: len(workers(pair.running)) == 2 and not old & set(workers(pair.running)))
    assert denied() == [7]
