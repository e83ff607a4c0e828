"""A live file: its contents, and how it follows new versions."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from limitforge import Limiter, ManualClock
from limitforge.catalog.credentials import PREFIXES, Credential, Peppers
from limitforge.catalog.live import live_file as file_module
from limitforge.catalog.live.file_source import FileSource, id_from_names, parse_contents
from limitforge.catalog.live.live_file import LiveFile
from limitforge.catalog.model import OPERATOR, KeyScope, to_datetime
from limitforge.errors import Forbidden, InvalidFile, InvalidInput, StoreUnavailable, UnknownKey
from tests.catalog.config.test_document import NOW, SAMPLE
from tests.catalog.conftest import PEPPERS

KEY = Credential.generate(PREFIXES["live"], "0123456789abcdef", Peppers.parse(PEPPERS))
OTHER = Credential.generate(PREFIXES["live"], "fedcba9876543210", Peppers.parse(PEPPERS))


def entry(credential: Credential, **fields: Any) -> str:
    kept = Peppers.parse(PEPPERS).hash_credential(credential)
    extra = "".join(f", {name}: {value}" for name, value in fields.items())
    return f"{{id: key_{credential.id}, name: web, secrets: [{{hash: '{kept.hash}', pepper: 1}}]{extra}}}"


def config(limit: int = 100, keys: str = "", more: str = "", operator: str = "{}", tenant: str = "") -> str:
    return dedent(f"""\
        operator: {operator}
        tenants:
          - name: acme
            default_plan: free
            plans: [{{name: free, limits: burst={limit}/minute}}]
            keys: [{keys or entry(KEY)}]
            {tenant}
          - name: other
            {more}
        """)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "plans.yaml"
    file.write_text(config())
    return file


@pytest.fixture
async def sink(clock: ManualClock) -> AsyncIterator[Limiter]:
    limiter = Limiter.connect("memory://", clock=clock)
    yield limiter
    await limiter.close()


@pytest.fixture
async def live_file(path: Path, sink: Limiter, peppers: Peppers, clock: ManualClock) -> AsyncIterator[LiveFile]:
    async with LiveFile(path, peppers, override_store=sink, clock=clock) as live_file:
        yield live_file


def write(path: Path, text: str) -> None:
    """Replace the file atomically, as recommended."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def move(source: Path, target: Path) -> None:
    source.rename(target)


async def limit_of(live_file: LiveFile) -> int | None:
    caller = await live_file.cache.callers.find(KEY.text)
    return caller.snapshot.select("GET:/").limits["burst"].size


# --- Contents of a file ----------------------------------------------------------------------------------------------


async def test_a_source_has_all_that_the_file_says() -> None:
    source = FileSource()
    source.set_contents(parse_contents(SAMPLE.read_bytes(), "sample.yaml", NOW))
    tenant_id = id_from_names("ten", "acme")
    found = await source.config(tenant_id)
    assert found is not None
    assert (found.tenant.name, found.tenant.default_plan_id) == ("acme", id_from_names("pla", "acme", "free"))
    assert [plan.name for plan in found.plans] == ["all", "flat", "free"]
    assert [policy.resource for policy in found.policies] == ["GET:/orders/{id}", "*"]
    key = await source.key("key_0123456789abcdef")
    assert key is not None
    assert (key.tenant_id, key.plan_id, len(key.secrets)) == (tenant_id, id_from_names("pla", "acme", "flat"), 2)
    assert len(await source.overrides(tenant_id)) == 2
    assert await source.override(tenant_id, "*", "user:42") is not None
    assert await source.tenants_with_overrides() == [tenant_id]
    operator = await source.config(OPERATOR)
    assert operator is not None
    assert operator.tenant.default_plan_id == id_from_names("pla", OPERATOR, "fleet")
    assert await source.config("ten_none") is None
    assert await source.key("key_none") is None


def test_ids_come_from_names() -> None:
    assert id_from_names("ten", "acme") == id_from_names("ten", "acme") != id_from_names("ten", "acme2")
    assert id_from_names("pla", "a", "b/c") != id_from_names("pla", "a/b", "c")
    assert len(id_from_names("ten", "acme")) == 20


def test_a_section_that_is_absent_is_an_empty_one() -> None:
    with pytest.raises(InvalidFile, match="unknown plan 'free'; known plans: none"):
        parse_contents(b"tenants: [{name: acme, default_plan: free}]", "plans.yaml", NOW)


def test_a_key_without_secrets_is_refused() -> None:
    with pytest.raises(InvalidFile, match="secrets: is required, since there is no database that has them"):
        parse_contents(b"tenants: [{name: acme, keys: [{id: key_0123456789abcdef, name: a}]}]", "plans.yaml", NOW)


def test_what_is_the_same_keeps_its_revision() -> None:
    source = FileSource()
    announcements = source.set_contents(parse_contents(config().encode(), "plans.yaml", NOW))
    assert {each.tenant_id for each in announcements} == {
        OPERATOR,
        id_from_names("ten", "acme"),
        id_from_names("ten", "other"),
    }
    assert source.set_contents(parse_contents(config().encode(), "plans.yaml", NOW)) == []
    (announcement,) = source.set_contents(parse_contents(config(200).encode(), "plans.yaml", NOW))
    assert (announcement.tenant_id, announcement.config, announcement.revision) == (
        id_from_names("ten", "acme"),
        True,
        3,
    )
    assert (announcement.keys, announcement.gone, announcement.overrides) == ((), (), False)


def test_added_changed_and_deleted_keys_are_announced() -> None:
    source = FileSource()
    source.set_contents(parse_contents(config(keys=entry(KEY)).encode(), "plans.yaml", NOW))
    (announcements,) = source.set_contents(
        parse_contents(config(keys=f"{entry(KEY, disabled='true')}, {entry(OTHER)}").encode(), "p", NOW)
    )
    assert (set(announcements.keys), announcements.gone, announcements.config) == (
        {f"key_{KEY.id}", f"key_{OTHER.id}"},
        (),
        False,
    )
    (announcements,) = source.set_contents(parse_contents(config(keys=entry(OTHER)).encode(), "p", NOW))
    assert (announcements.keys, announcements.gone) == ((), (f"key_{KEY.id}",))


# --- How it serves ---------------------------------------------------------------------------------------------------


async def test_a_key_of_the_file_is_recognised(live_file: LiveFile) -> None:
    caller = await live_file.cache.callers.find(KEY.text)
    assert caller.snapshot.tenant.name == "acme"
    assert await limit_of(live_file) == 100
    with pytest.raises(UnknownKey):
        await live_file.cache.callers.find(OTHER.text)
    assert (live_file.status().file, live_file.status().error, live_file.status().revision) == ("ok", None, 1)


async def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, peppers: Peppers) -> None:
    wrong = tmp_path / "plans.yaml"
    wrong.write_text("tenants:\n  - name: a\n    mode: maybe\n")
    with pytest.raises(InvalidFile, match=r"plans.yaml:3: tenants\[0\].mode: must be one of"):
        await LiveFile(wrong, peppers).start()
    with pytest.raises(InvalidInput, match=r"none\.yaml: can't be read: No such file"):
        await LiveFile(tmp_path / "none.yaml", peppers).start()


async def test_a_new_version_is_in_force_without_a_restart(live_file: LiveFile, path: Path) -> None:
    assert await limit_of(live_file) == 100
    with pytest.raises(UnknownKey):
        await live_file.cache.callers.find(OTHER.text)
    write(path, config(200, keys=f"{entry(KEY)}, {entry(OTHER, disabled='true')}", operator="{mode: monitor}"))
    await live_file.poll()
    assert await limit_of(live_file) == 200
    other = await live_file.cache.callers.find(OTHER.text)
    with pytest.raises(Forbidden):
        other.require(KeyScope.CHECK)
    assert other.snapshot.operator.tenant.mode == "monitor"
    assert live_file.status().revision == 2


async def test_it_is_watched_by_itself(live_file: LiveFile, path: Path) -> None:
    write(path, config(300))
    async with asyncio.timeout(30):
        while await limit_of(live_file) != 300:  # noqa: ASYNC110 - there is no event for a poll
            await asyncio.sleep(0.01)


async def test_a_caller_that_is_held_gets_the_new_version(live_file: LiveFile, path: Path) -> None:
    caller = await live_file.cache.callers.find(KEY.text)
    write(path, config(200))
    await live_file.poll()
    assert caller.snapshot.select("GET:/").limits["burst"].size == 200


async def test_a_key_or_tenant_that_is_gone_is_refused(live_file: LiveFile, path: Path) -> None:
    await limit_of(live_file)
    write(path, config(keys=entry(OTHER)))
    await live_file.poll()
    with pytest.raises(UnknownKey):
        await limit_of(live_file)
    await live_file.cache.callers.find(OTHER.text)
    write(path, "tenants: []")
    await live_file.poll()
    with pytest.raises(UnknownKey):
        await live_file.cache.callers.find(OTHER.text)


async def test_a_wrong_version_leaves_the_last_good_one_in_force(
    live_file: LiveFile, path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.advance_us(5_000_000)
    with caplog.at_level(logging.INFO, logger="limitforge.catalog.live.live_file"):
        write(path, config(limit="lots"))  # type: ignore[arg-type]
        await live_file.poll()
        assert await limit_of(live_file) == 100
        status = live_file.status()
        assert (status.file, status.since) == ("degraded", clock.now_us() / 1e6)
        assert status.error is not None
        assert "plans.yaml:5: tenants[0].plans[0].limits: expected" in status.error
        since = status.since
        clock.advance_us(5_000_000)
        await live_file.poll()
        os.utime(path)  # the same content once more
        await live_file.poll()
        assert live_file.status().since == since
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        write(path, config(300))
        await live_file.poll()
    assert await limit_of(live_file) == 300
    assert (live_file.status().file, live_file.status().error) == ("ok", None)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "WARNING"]


async def test_back_to_what_was_good_is_good(live_file: LiveFile, path: Path) -> None:
    write(path, "tenants: 5")
    await live_file.poll()
    assert live_file.status().file == "degraded"
    write(path, config())
    await live_file.poll()
    assert live_file.status().file == "ok"
    assert await limit_of(live_file) == 100


async def test_a_file_that_is_away_for_a_moment_is_no_change(
    live_file: LiveFile, path: Path, clock: ManualClock
) -> None:
    aside = path.with_suffix(".aside")
    move(path, aside)
    await live_file.poll()
    clock.advance_us(1_000_000)
    await live_file.poll()
    assert (live_file.status().file, await limit_of(live_file)) == ("ok", 100)
    clock.advance_us(5_000_000)
    await live_file.poll()
    assert (live_file.status().file, await limit_of(live_file)) == ("degraded", 100)
    move(aside, path)
    await live_file.poll()
    assert live_file.status().file == "ok"


async def test_a_volume_that_swaps_its_symlink_is_followed(tmp_path: Path, peppers: Peppers) -> None:
    """Kubernetes mounts a ConfigMap like this: `plans.yaml` is a link through `..data`, which is replaced."""
    for number, limit in ((1, 100), (2, 200)):
        (tmp_path / f"..v{number}").mkdir()
        (tmp_path / f"..v{number}" / "plans.yaml").write_text(config(limit))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "plans.yaml").symlink_to("..data/plans.yaml")
    async with LiveFile(tmp_path / "plans.yaml", peppers) as live_file:
        assert await limit_of(live_file) == 100
        (tmp_path / "..new").symlink_to("..v2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await live_file.poll()
        assert await limit_of(live_file) == 200


async def test_a_file_that_is_still_being_written_is_not_taken(
    live_file: LiveFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = config(200)[: len(config(200)) // 2]
    write(path, "tenants: []\n")  # the part that is written is valid, and would delete everything
    taken = file_module._read_bytes

    def read_while_somebody_writes(file: Path) -> bytes:
        content = taken(file)
        path.write_text(half)
        return content

    monkeypatch.setattr(file_module, "_read_bytes", read_while_somebody_writes)
    await live_file.poll()
    assert await limit_of(live_file) == 100
    monkeypatch.undo()
    write(path, config(200))
    await live_file.poll()
    assert await limit_of(live_file) == 200


# --- Overrides -------------------------------------------------------------------------------------------------------


def overrides(clock: ManualClock, *limits: int, seconds: float = 3_600) -> str:
    until = (to_datetime(clock.now_us()) + timedelta(seconds=seconds)).isoformat()
    listed = [
        f"{{subject: 'user:{index}', limits: {{burst: {{limit: {limit}}}}}, expires_at: {until}}}"
        for index, limit in enumerate(limits)
    ]
    return f"overrides: [{', '.join(listed)}]"


async def in_force(sink: Limiter) -> dict[str, Any]:
    page = await sink.list_overrides(tenant=id_from_names("ten", "acme"))
    return {each.subject: each.limits for each in page.overrides}


async def test_overrides_of_the_file_are_in_force_and_go_with_it(
    path: Path, sink: Limiter, peppers: Peppers, clock: ManualClock
) -> None:
    write(path, config(tenant=overrides(clock, 500, 600)))
    async with LiveFile(path, peppers, override_store=sink, clock=clock) as live_file:
        assert await in_force(sink) == {"user:0": {"burst": {"limit": 500}}, "user:1": {"burst": {"limit": 600}}}
        write(path, config(tenant=overrides(clock, 700)))
        await live_file.poll()
        assert await in_force(sink) == {"user:0": {"burst": {"limit": 700}}}
    write(path, config())
    async with LiveFile(
        path, peppers, override_store=sink, clock=clock
    ):  # overrides that were removed while no process ran are deleted too
        assert await in_force(sink) == {}


async def test_overrides_that_could_not_be_mirrored_are_mirrored_later(
    path: Path, sink: Limiter, peppers: Peppers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    async with LiveFile(path, peppers, override_store=sink, clock=clock) as live_file:
        write(path, config(tenant=overrides(clock, 500)))
        with monkeypatch.context() as patched:
            patched.setattr(sink, "list_overrides", away)
            await live_file.poll()
        assert await in_force(sink) == {}
        await live_file.poll()
        assert await in_force(sink) == {"user:0": {"burst": {"limit": 500}}}
