"""The commands of the catalog, run in a folder with a SQLite file."""

import contextlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from limitforge.catalog.credentials import Credential, Peppers
from tests.cli.command import ENVIRONMENT, INSTALLED_PROGRAM, SECONDS, RunningCommand, run_cli

PEPPERS = "1:a pepper that the tests alone know"
NEXT_YEAR = (datetime.now(UTC) + timedelta(days=365)).isoformat()
SECRET = re.compile(r"lf_(?:live|test|admin)_[0-9A-Za-z]{55}")


def _id(key: str) -> str:
    return f"key_{Credential.parse(key, Peppers.parse(PEPPERS)).id}"


class Workspace:
    """A folder in which a user runs commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str, status: int = 0, stdin: bytes | None = None, **environment: str) -> str:
        """Return its stdout, or its stderr if it fails."""
        done = run_cli(
            *arguments,
            stdin=stdin,
            folder=self.folder,
            LIMITFORGE_PEPPERS=PEPPERS,
            LIMITFORGE_ACTOR="test:ann",
            **environment,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status in (0, 1) else done.stderr

    def warnings(self, *arguments: str) -> list[str]:
        """Return the lines that it prints to stderr."""
        done = run_cli(*arguments, folder=self.folder, LIMITFORGE_PEPPERS=PEPPERS)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert "warning" not in done.stdout
        return done.stderr.splitlines()

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def write(self, text: str) -> str:
        (self.folder / "plans.yaml").write_text(text)
        return "plans.yaml"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.fixture
def acme(workspace: Workspace) -> Workspace:
    """A workspace with a tenant that has plans, a policy and an override."""
    workspace.run(
        "apply",
        "-",
        stdin=f"""
tenants:
  - name: acme
    default_plan: free
    plans: [{{name: free, limits: burst=100/minute}}, {{name: pro, limits: burst=1000/minute}}]
    policies: [{{resource: "GET:/orders/{{id}}", plan: pro}}]
    keys: []
    overrides: [{{subject: "user:42", limits: {{burst: {{limit: 500}}}}, expires_at: {NEXT_YEAR}}}]
""".encode(),
    )
    return workspace


# --- A tour ----------------------------------------------------------------------------------------------------------


def test_a_tenant_from_creation_to_deletion(workspace: Workspace) -> None:
    assert re.fullmatch(
        r"Created tenant acme \(ten_\w{16}\)\.\n", workspace.run("tenants", "create", "acme", "--mode", "monitor")
    )
    workspace.run("plans", "create", "free", "--tenant", "acme", "--limits", "100/minute; burst=token:10/second")
    flat = '{"algorithm": "token_bucket", "bucket_capacity": 5, "refill_rate_per_sec": 2}'
    workspace.run("plans", "create", "pro", "--tenant", "acme", "--limits", flat)
    workspace.run(
        "tenants", "update", "acme", "--default-plan", "free", "--failure", "closed", "--time-zone", "Europe/Berlin"
    )
    shown = workspace.run("tenants", "show", "acme")
    for line in ("default plan  free", "mode          monitor", "failure       closed", "time zone     Europe/Berlin"):
        assert line in shown
    workspace.run("tenants", "update", "acme", "--failure", "none", "--mode", "on", "--name", "acme-2")
    (tenant,) = workspace.json("tenants", "list")
    assert (tenant["name"], tenant["failure"], tenant["mode"]) == ("acme-2", None, "on")
    workspace.run("tenants", "suspend", "acme-2")
    assert "suspended" in workspace.run("tenants", "list")
    workspace.run("tenants", "resume", tenant["id"])
    assert workspace.json("tenants", "show", "acme-2")["suspended"] is False
    assert "still in use by the tenant (its default plan)" in workspace.run("plans", "delete", "free", status=2)
    assert "--yes: is required when the standard input is not a terminal" in workspace.run(
        "tenants", "delete", "acme-2", status=2
    )
    workspace.run("tenants", "delete", "acme-2", "--yes")
    assert workspace.json("tenants", "list") == []
    assert workspace.run("tenants", "list") == ""


def test_plans_have_versions_and_can_be_rolled_back(acme: Workspace) -> None:
    acme.run("plans", "update", "free", "--tenant", "acme", "--limits", "burst=200/minute")
    assert "200 in 60 s" in acme.run("plans", "list", "--tenant", "acme")
    versions = acme.json("plans", "history", "free")
    assert [(each["version"], each["created_by"]) for each in versions] == [(2, "test:ann"), (1, "test:ann")]
    acme.run("plans", "rollback", "free")
    assert acme.json("plans", "show", "free")["limits"][0]["limit"] == 100
    acme.run("plans", "rollback", "free", "--to", "2")
    assert (
        acme.json("plans", "show", "free")["version"],
        acme.json("plans", "show", "free")["limits"][0]["limit"],
    ) == (4, 200)
    assert "plan free has no version 9; it is at 4" in acme.run("plans", "rollback", "free", "--to", "9", status=2)
    assert "limit burst  algorithm sliding_window_counter, limit 200" in acme.run("plans", "show", "free")


def test_policies_say_which_plan_applies(acme: Workspace) -> None:
    acme.run(
        "policies", "create", "POST:*", "--tenant", "acme", "--plan", "free", "--priority", "P1", "--shadow-plan", "pro"
    )
    acme.run(
        "policies", "update", "POST:*", "--tenant", "acme", "--mode", "off", "--shadow-plan", "none", "--plan", "pro"
    )
    policy = acme.json("policies", "show", "POST:*")
    assert (policy["mode"], policy["priority"], policy["shadow_plan_id"]) == ("off", "P1", None)
    assert re.search(r"^POST:\*\s+acme\s+pro\s+off\s+-\s+P1\s+pol_", acme.run("policies", "list"), re.MULTILINE)
    acme.run("policies", "delete", policy["id"])
    assert [each["resource"] for each in acme.json("policies", "list")] == ["GET:/orders/{id}"]


def test_a_key_is_printed_once(acme: Workspace) -> None:
    printed = acme.run(
        "keys", "create", "web", "--tenant", "acme", "--plan", "pro", "--expires", "90d", "--metadata", '{"a": 1}'
    )
    assert "Keep it: it is shown only once." in printed
    (secret,) = SECRET.findall(printed)
    rotated = acme.json("keys", "rotate", "web", "--grace", "24h")
    assert SECRET.fullmatch(rotated["key"])
    assert rotated["key"] != secret
    assert _id(rotated["key"]) == _id(secret)
    assert len(rotated["secrets"]) == 2
    acme.run("keys", "disable", "web")
    assert re.search(r"^web\s+acme\s+live\s+pro\s+disabled\s", acme.run("keys", "list"), re.MULTILINE)
    assert acme.run("keys", "enable", "web").startswith("Enabled key web")
    assert re.search(r"^web\s+acme\s+live\s+pro\s+active\s", acme.run("keys", "list"), re.MULTILINE)
    acme.run("keys", "update", "web", "--expires", "none", "--scope", "check", "--plan", "none", "--name", "site")
    key = acme.json("keys", "show", "site")
    assert (key["expires_at"], key["scopes"], key["plan_id"], key["metadata"]) == (None, ["check"], None, {"a": 1})
    later = "".join(acme.run(*arguments) for arguments in (("keys", "show", "site"), ("audit", "list"), ("export",)))
    later += json.dumps([acme.json("keys", "list"), acme.json("audit", "list")])
    assert not SECRET.search(later)
    assert '"hash"' not in later
    acme.run("keys", "delete", "site")
    assert acme.json("keys", "list") == []


def test_a_key_for_a_file_needs_no_database(workspace: Workspace) -> None:
    printed = workspace.run("keys", "make", "--name", "web", "--type", "test")
    (secret,) = SECRET.findall(printed)
    assert secret.startswith("lf_test_")
    lines = printed.partition("`keys` of its tenant:\n\n")[2]
    assert list(workspace.folder.iterdir()) == []
    workspace.write(f"tenants:\n  - name: acme\n    keys:\n{lines}")
    workspace.run("apply", "plans.yaml")
    (key,) = workspace.json("keys", "list")
    assert (key["id"], key["type"]) == (_id(secret), "test")
    made = workspace.json("keys", "make", "--name", "x")
    assert made["entry"]["id"] == _id(made["key"])


def test_overrides_are_set_replaced_and_deleted(acme: Workspace) -> None:
    acme.run(
        "overrides", "set", "user:7", "--tenant", "acme", "--limit", "burst=9", "--for", "1h30m", "--reason", "[red]why"
    )
    acme.run("overrides", "set", "user:7", "--tenant", "acme", "--limit", "burst=blocked", "--until", NEXT_YEAR)
    override = acme.json("overrides", "show", "user:7", "--tenant", "acme")
    assert (override["limits"], override["set_by"], override["version"]) == ({"burst": "blocked"}, "test:ann", 2)
    fields = '{"burst": {"limit": 5, "window_seconds": 2}}'
    acme.run(
        "overrides", "set", "a\x1b[31mb", "--tenant", "acme", "--limits", fields, "--for", "1h", "--reason", "[red]why"
    )
    listed = acme.run("overrides", "list")
    assert "burst: 5, window_seconds 2" in listed
    assert "[red]why" in listed
    assert "a\\x1b[31mb" in listed
    assert "\x1b" not in listed
    acme.run("overrides", "delete", "user:7", "--tenant", "acme")
    assert "tenant acme has no override of 'user:7' on '*'" in acme.run(
        "overrides", "delete", "user:7", "--tenant", "acme", status=2
    )


def test_expired_keys_are_marked_and_expired_overrides_are_left_out(acme: Workspace) -> None:
    acme.run("keys", "create", "old", "--tenant", "acme", "--expires", "2020-01-01T00:00:00Z")
    acme.run("keys", "create", "new", "--tenant", "acme", "--expires", "2h")
    assert re.findall(r"^(\w+) .* (active|expired) ", acme.run("keys", "list"), re.MULTILINE) == [
        ("new", "active"),
        ("old", "expired"),
    ]
    ends = datetime.fromisoformat(acme.json("keys", "show", "new")["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=1.5) < ends < timedelta(hours=2)
    acme.run("overrides", "set", "user:7", "--tenant", "acme", "--limit", "burst=5", "--for", "900ms")
    deadline = time.monotonic() + SECONDS / 2
    while [each["subject"] for each in acme.json("overrides", "list")] != ["user:42"]:
        assert time.monotonic() < deadline
    assert "user:7" not in acme.run("overrides", "list")


def test_lists_and_names_are_limited_to_the_given_tenant(acme: Workspace) -> None:
    until = NEXT_YEAR
    over = f"[{{subject: 'user:42', limits: {{x: blocked}}, expires_at: {until}}}]"
    file = f"tenants: [{{name: globex, plans: [{{name: free, limits: x=1/s}}], overrides: {over}}}]"
    acme.run("apply", "-", stdin=file.encode())
    for name in ("acme", "globex"):
        acme.run("keys", "create", "web", "--tenant", name)
        acme.run("tokens", "create", f"of-{name}", "--tenant", name)
    ids = {each["name"]: each["id"] for each in acme.json("tenants", "list")}
    for kind, count in (("plans", 2), ("policies", 1), ("keys", 1), ("overrides", 1), ("tokens", 1)):
        found = acme.json(kind, "list", "--tenant", "acme")
        assert [each["tenant_id"] for each in found] == [ids["acme"]] * count, kind
    assert acme.json("overrides", "show", "user:42", "--tenant", "globex")["limits"] == {"x": "blocked"}
    acme.run("overrides", "set", "user:42", "--tenant", "acme", "--limit", "burst=1", "--for", "1h", "--resource", "r")
    assert acme.json("overrides", "show", "user:42", "--tenant", "acme", "--resource", "r")["limits"] == {
        "burst": {"limit": 1}
    }
    for resource in ("r", "*"):
        shown = acme.json("overrides", "show", "user:42", "--tenant", "acme", "--resource", resource)
        assert shown["resource"] == resource
    acme.run("overrides", "delete", "user:42", "--tenant", "acme", "--resource", "r")
    assert [each["resource"] for each in acme.json("overrides", "list", "--tenant", "acme")] == ["*"]
    acme.run("keys", "delete", "web", "--tenant", "globex")
    assert [each["tenant_id"] for each in acme.json("keys", "list")] == [ids["acme"]]


def test_admin_tokens_are_printed_once(acme: Workspace) -> None:
    (secret,) = SECRET.findall(
        acme.run("tokens", "create", "ci", "--scope", "read", "--scope", "write", "--tenant", "acme")
    )
    assert secret.startswith("lf_admin_")
    acme.run("tokens", "update", "ci", "--name", "deploy", "--expires", "7d")
    assert re.search(r"deploy\s+read, write\s+acme", acme.run("tokens", "list"))
    assert not SECRET.search(acme.run("tokens", "show", "deploy") + json.dumps(acme.json("tokens", "show", "deploy")))
    acme.run("tokens", "delete", "deploy")
    assert acme.json("tokens", "list") == []


def test_the_operator_has_a_plan_and_a_mode(workspace: Workspace) -> None:
    workspace.run("plans", "create", "fleet", "--tenant", "operator", "--limits", "10000/second")
    assert workspace.run("operator", "set", "--plan", "fleet", "--mode", "monitor") == "Changed the operator.\n"
    shown = workspace.run("operator", "show")
    assert re.search(r"^mode\s+monitor$", shown, re.MULTILINE)
    assert re.search(r"^plan\s+fleet$", shown, re.MULTILINE)
    assert workspace.json("operator", "set", "--plan", "none")["default_plan_id"] is None


def test_the_audit_log_shows_who_changed_what(acme: Workspace) -> None:
    acme.run("plans", "update", "free", "--limits", "burst=7/minute", "--tenant", "acme")
    line = acme.run("audit", "list", "--limit", "1", "--tenant", "acme").splitlines()[1]
    assert re.fullmatch(
        r"\S+ \S+\s+test:ann\s+plan.update\s+free\s+"
        r"burst.algorithm: sliding_window_counter -> sliding_window, burst.limit: 100 -> 7",
        line,
    )
    (entry,) = acme.json("audit", "list", "--limit", "1")
    assert (entry["actor"], entry["before"]["version"], entry["after"]["version"]) == ("test:ann", 1, 2)
    assert acme.json("audit", "list", "--entity", entry["entity_id"])[0] == entry


def test_the_audit_log_of_one_tenant_has_no_other_tenants_entries(acme: Workspace) -> None:
    acme.run("apply", "-", stdin=b"tenants: [{name: globex, plans: [{name: free, limits: 5/s}]}]")
    acme.run("plans", "update", "free", "--limits", "9/s", "--tenant", "globex")
    ids = {each["name"]: each["id"] for each in acme.json("tenants", "list")}
    globex = acme.json("audit", "list", "--tenant", "globex")
    assert [each["action"] for each in globex] == ["plan.update", "plan.create", "tenant.create"]
    assert {each["tenant_id"] for each in globex} == {ids["globex"]}
    assert {each["tenant_id"] for each in acme.json("audit", "list", "--tenant", "acme")} == {ids["acme"]}
    assert acme.run("audit", "list", "--tenant", "globex").count("globex") == 1
    acme.run("tenants", "delete", "globex", "--yes")
    assert [each["action"] for each in acme.json("audit", "list", "--tenant", ids["globex"])][:1] == ["tenant.delete"]
    assert "unknown tenant 'globex'" in acme.run("audit", "list", "--tenant", "globex", status=2)


# --- Config as code --------------------------------------------------------------------------------------------------


def test_a_file_is_previewed_and_applied_and_then_unchanged(acme: Workspace) -> None:
    acme.write(acme.run("export").replace("limit: 1000\n", "limit: 2000\n"))
    difference = "~ tenant acme / plan pro\n    limits.burst.limit: 1000 -> 2000\n\n"
    assert acme.run("diff", "plans.yaml", status=1) == f"{difference}0 to create, 1 to change, 0 to delete.\n"
    assert acme.run("apply", "plans.yaml", "--dry-run") == f"{difference}0 to create, 1 to change, 0 to delete.\n"
    assert acme.run("apply", "plans.yaml") == f"{difference}0 created, 1 changed, 0 deleted.\n"
    assert acme.run("apply", "plans.yaml") == "Nothing to change.\n"
    assert acme.run("diff", "plans.yaml") == "Nothing to change.\n"
    assert acme.json("diff", "plans.yaml", "--prune") == {"applied": False, "changes": []}


@pytest.mark.parametrize("command", [("apply", "--dry-run"), ("diff",)], ids=["apply", "diff"])
def test_a_dry_run_with_prune_prints_deletions_and_deletes_nothing(acme: Workspace, command: tuple[str, ...]) -> None:
    acme.run("tenants", "create", "globex")
    before, history = acme.run("export"), acme.json("audit", "list")
    acme.write("tenants: [{name: acme, default_plan: free}]")
    status = int(command == ("diff",))
    message = "- tenant globex\n\n0 to create, 0 to change, 1 to delete.\n"
    assert acme.run(*command, "plans.yaml", "--prune", status=status) == message
    assert acme.run(*command, "plans.yaml") == "Nothing to change.\n"
    assert (acme.run("export"), acme.json("audit", "list")) == (before, history)
    assert acme.run("apply", "plans.yaml", "--prune").endswith("0 created, 0 changed, 1 deleted.\n")
    assert [each["name"] for each in acme.json("tenants", "list")] == ["acme"]


def test_an_export_recreates_the_catalog_elsewhere(acme: Workspace) -> None:
    acme.run("keys", "create", "web", "--tenant", "acme")
    text = acme.run("export")
    acme.run("apply", "-", "--database", "sqlite:///other.db", stdin=text.encode())
    assert acme.run("export", LIMITFORGE_DATABASE_URL="sqlite:///other.db") == text
    assert json.loads(acme.run("export", "--tenant", "acme", "--json"))["tenants"][0]["name"] == "acme"


def test_an_error_in_a_file_names_the_line_and_the_field(workspace: Workspace) -> None:
    workspace.write("tenants:\n  - name: acme\n    mode: maybe\n    plans:\n      - {name: a, limits: 5}\n")
    assert workspace.run("apply", "plans.yaml", status=2) == (
        "Error: plans.yaml:3: tenants[0].mode: must be one of on, monitor, off, got 'maybe'\n"
        "plans.yaml:5: tenants[0].plans[0].limits: must be a list of limits, or their text, got 5\n"
    )
    assert "nowhere.yaml: can't be read: No such file or directory" in workspace.run("diff", "nowhere.yaml", status=2)


def test_the_schema_is_printed(workspace: Workspace) -> None:
    assert json.loads(workspace.run("schema"))["$schema"].endswith("2020-12/schema")


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("tenants", "create", "a b"), 2, "name: must be 1 to 64 letters, digits or -_./ characters, got 'a b'"),
        (("tenants", "show", "missing"), 2, "unknown tenant 'missing'"),
        (("plans", "create", "a", "--tenant", "operator", "--limits", "5/eon"), 2, "expected a unit"),
        (("plans", "create", "a", "--tenant", "operator", "--limits", "[1"), 2, "--limits: is not valid JSON"),
        (("keys", "create", "a", "--tenant", "operator", "--expires", "soon"), 2, "--expires: must be a time such as"),
        (("keys", "rotate", "a", "--grace", "soon"), 2, "--grace: must be a duration such as 90s, 15m, 24h or 7d"),
        (("overrides", "set", "a", "--tenant", "operator", "--limit", "x=1"), 2, "--for: exactly one of --for and"),
        (("overrides", "set", "a", "--tenant", "b", "--limit", "x", "--for", "1h"), 2, "--limit: must be NAME="),
        (("tenants", "list", "--database", "mysql://x"), 2, "database: must be a sqlite:// or postgresql:// URL"),
        (("tenants", "list", "--database", "postgresql://127.0.0.1:1/x"), 3, "x at 127.0.0.1:1 is unavailable"),
        (("tenants", "list", "--database", "sqlite:////nowhere/at/all.db"), 3, "unable to open database file"),
        (("db", "downgrade", "base"), 2, "--yes: is required when the standard input is not a terminal"),
        (("db", "upgrade", "--database", "sqlite:///x.db", "--nope"), 2, "No such option"),
    ],
)  # fmt: skip
def test_an_error_is_one_message_and_an_exit_status(
    workspace: Workspace, arguments: tuple[str, ...], status: int, message: str
) -> None:
    assert message in workspace.run(*arguments, status=status)


def test_without_peppers_it_prints_new_ones(workspace: Workspace) -> None:
    done = run_cli("keys", "make", "--name", "web", folder=workspace.folder)
    assert done.returncode == 2
    (line,) = re.findall(r"^  export LIMITFORGE_PEPPERS='(.*)'$", done.stderr, re.MULTILINE)
    made = run_cli("keys", "make", "--name", "web", folder=workspace.folder, LIMITFORGE_PEPPERS=line)
    assert made.returncode == 0


def test_an_ambiguous_name_needs_a_tenant(workspace: Workspace) -> None:
    workspace.run(
        "apply",
        "-",
        stdin=b"tenants: [{name: a, plans: [{name: p, limits: 1/s}]}, {name: b, plans: [{name: p, limits: 2/s}]}]",
    )
    assert "2 plan entries are called p: pass an id instead, or name the tenant with --tenant" in workspace.run(
        "plans", "show", "p", status=2
    )
    assert workspace.json("plans", "show", "p", "--tenant", "b")["limits"][0]["limit"] == 2


def test_the_schema_of_the_database_is_upgraded_and_downgraded(workspace: Workspace) -> None:
    assert workspace.json("db", "status")["schema"] is None
    assert list(workspace.folder.iterdir()) == []  # `db status` creates no file
    newest = workspace.json("db", "upgrade")["schema"]
    assert f"{newest}, the newest" in workspace.run("db", "status")
    assert workspace.json("db", "downgrade", "base", "--yes")["schema"] is None
    assert "Can't locate revision" in workspace.run("db", "downgrade", "9999", "--yes", status=2)


def test_a_postgres_database_is_upgraded_explicitly(workspace: Workspace, postgres_url: str) -> None:
    at = ("--database", postgres_url)
    message = workspace.run("tenants", "list", *at, status=2)
    assert re.search(
        r"the schema of test_\w+ at 127.0.0.1:\d+ is missing, and \d+ is needed: run `limitforge db upgrade`", message
    )
    workspace.run("db", "upgrade", *at)
    workspace.run("apply", "-", *at, stdin=b"tenants: [{name: acme, plans: [{name: free, limits: 5/s}]}]")
    assert "acme" in workspace.run("tenants", "list", *at)
    assert "name: acme" in workspace.run("export", *at)


def test_the_default_actor_is_the_user_of_the_system(workspace: Workspace) -> None:
    run_cli("tenants", "create", "acme", folder=workspace.folder, USER="ann", LOGNAME="ann")
    assert [entry["actor"] for entry in workspace.json("audit", "list")] == ["cli:ann"]


@pytest.mark.parametrize("package", ["sqlalchemy", "yaml"])
def test_without_the_catalog_extra_it_prints_how_to_install_it(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['limitforge', 'schema']; "
    program += "from limitforge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "This command needs more packages: pip install 'limitforge[catalog]'\n"


def test_other_commands_start_without_the_catalogs_packages() -> None:
    program = "import sys; sys.argv = ['limitforge', 'burst', '1/second', '--requests', '1', '--rate', 'max']\n"
    program += "from limitforge.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    program += "print([name for name in ('sqlalchemy', 'alembic', 'yaml') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, timeout=SECONDS, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- Help and terminals------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "example"),
    [
        ("tenants", "limitforge tenants update acme --default-plan free"),
        ("plans", 'limitforge plans create free --tenant acme --limits "100/minute; 1000/hour"'),
        ("policies", 'limitforge policies create "GET:/orders/{id}" --tenant acme --plan free'),
        ("keys", "limitforge keys rotate web --tenant acme --grace 24h"),
        ("overrides", "limitforge overrides set user:42 --tenant acme --limit burst=500 --for 24h"),
        ("operator", "limitforge operator set --mode monitor"),
        ("tokens", "limitforge tokens create dashboard"),
        ("audit", "limitforge audit list --tenant acme"),
        ("db", "limitforge db status"),
        ("apply", "limitforge apply plans.yaml --dry-run"),
        ("diff", "limitforge diff plans.yaml"),
        ("export", "limitforge export > plans.yaml"),
        ("schema", "limitforge schema > limitforge.schema.json"),
    ],
)
def test_help_shows_examples_and_fits_a_terminal(workspace: Workspace, group: str, example: str) -> None:
    lines = workspace.run(group, "--help").splitlines()
    assert example in [line.strip() for line in lines]
    assert max(len(line) for line in lines) <= 80


def in_a_terminal(folder: Path, *arguments: str, typed: str = "") -> tuple[int, str]:
    """Return the exit status and the screen."""
    ours, theirs = pty.openpty()
    with RunningCommand(
        *arguments, files=(theirs, theirs, theirs), folder=folder, environment={"LIMITFORGE_ACTOR": "test:ann"}
    ) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        screen = b""
        while True:
            try:
                screen += os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
        status = process.wait(SECONDS)
    os.close(ours)
    return status, screen.decode()


def test_tables_fit_a_terminal_and_piped_tables_are_plain(acme: Workspace) -> None:
    _, screen = in_a_terminal(acme.folder, "plans", "list")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen).replace("\r", "")
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "\x1b[1m" in screen
    piped = acme.run("plans", "list")
    assert "\x1b" not in piped
    assert not any(line.endswith(" ") for line in piped.splitlines())


@pytest.mark.parametrize(("typed", "status", "left"), [("n\n", 1, 1), ("y\n", 0, 0)])
def test_a_tenant_is_deleted_only_after_confirmation(acme: Workspace, typed: str, status: int, left: int) -> None:
    done, screen = in_a_terminal(acme.folder, "tenants", "delete", "acme", typed=typed)
    assert done == status
    assert "Delete tenant acme with its plans, policies, keys and overrides?" in screen
    assert len(acme.json("tenants", "list")) == left


# --- Warnings --------------------------------------------------------------------------------------------------------

TENANT_WIDE_LIMIT = (
    '[{{"name": "w", "algorithm": "fixed_window", "limit": 5, "window_seconds": {}, "scope": "tenant"}}]'
)
SEPARATE_COUNTERS = """
tenants:
  - name: globex
    plans:
      - {name: one, limits: [{name: w, algorithm: fixed_window, limit: 5, window_seconds: 60, scope: caller}]}
      - {name: two, limits: [{name: w, algorithm: fixed_window, limit: 5, window_seconds: 90, scope: caller}]}
    policies: [{resource: "GET:/a", plan: one}, {resource: "GET:/b", plan: two}]
"""


def test_limits_of_one_name_that_count_separately_cause_a_warning(acme: Workspace) -> None:
    tenant = ("--tenant", "acme")
    assert acme.warnings("plans", "create", "one", *tenant, "--limits", TENANT_WIDE_LIMIT.format(60)) == []
    [message] = acme.warnings("plans", "create", "two", *tenant, "--limits", TENANT_WIDE_LIMIT.format(90), "--json")
    assert message.startswith("warning: limit w ")
    assert "one, two" in message
    assert "different names, or the same window" in message
    assert acme.warnings("policies", "create", "GET:/a", *tenant, "--plan", "one") == []
    assert acme.warnings("policies", "create", "GET:/b", *tenant, "--plan", "two") == [message]
    assert acme.warnings("policies", "update", "GET:/b", *tenant, "--mode", "monitor") == [message]
    assert acme.warnings("plans", "update", "two", *tenant, "--limits", TENANT_WIDE_LIMIT.format(60)) == []
    assert acme.warnings("plans", "rollback", "two", *tenant) == [message]


def test_a_file_with_limits_of_one_name_that_count_separately_causes_a_warning(workspace: Workspace) -> None:
    file = workspace.write(SEPARATE_COUNTERS)
    for arguments in (("diff", file), ("apply", file, "--dry-run"), ("apply", file, "--json"), ("diff", file)):
        [message] = workspace.warnings(*arguments)
        assert message.startswith("warning: tenant globex: limit w ")


# --- A large file ----------------------------------------------------------------------------------------------------


def write_large(folder: Path, count: int, limit: int = 5) -> None:
    tenants = "".join(
        f"  - {{name: t{at}, default_plan: free, plans: [{{name: free, limits: {limit}/minute}}]}}\n"
        for at in range(count)
    )
    (folder / "large.yaml").write_text(f"tenants:\n{tenants}")


def tenants_in(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(database, timeout=SECONDS)) as connection:
        (number,) = connection.execute("SELECT count(*) FROM tenants").fetchone()
    return int(number)


@pytest.mark.slow
def test_ctrl_c_during_apply_reports_the_progress_and_the_next_run_finishes(workspace: Workspace) -> None:
    write_large(workspace.folder, 1_500)
    workspace.run("tenants", "create", "first")
    with subprocess.Popen(
        [INSTALLED_PROGRAM, "apply", "large.yaml"],
        cwd=workspace.folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + SECONDS
        while tenants_in(workspace.folder / "limitforge.db") < 100:
            time.sleep(0.01)
            assert time.monotonic() < deadline
            assert process.poll() is None, "it was done before it could be interrupted"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    found = re.search(r"Stopped: ([0-9,]+) of 1,500 tenants were applied completely, and the others not at all", stderr)
    assert found is not None, stderr
    assert stdout == ""
    done = int(found[1].replace(",", ""))
    assert len(json.loads(workspace.run("tenants", "list", "--json"))) == done + 1
    assert len(json.loads(workspace.run("plans", "list", "--json"))) == done
    printed = workspace.run("apply", "large.yaml")
    assert printed.endswith(f"{2 * (1_500 - done)} created, 0 changed, 0 deleted.\n")
    assert workspace.run("diff", "large.yaml") == "Nothing to change.\n"


@pytest.mark.slow
def test_a_large_apply_shows_its_progress_on_stderr_only(workspace: Workspace) -> None:
    write_large(workspace.folder, 400)
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [INSTALLED_PROGRAM, "apply", "large.yaml", "--json"],
        cwd=workspace.folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=follower,
    ) as process:
        os.close(follower)
        screen: list[bytes] = []
        reader = threading.Thread(target=lambda: screen.append(read_all(leader)))
        reader.start()
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        process.wait(SECONDS)
        reader.join(SECONDS)
    os.close(leader)
    assert answer["applied"] is True
    assert len(answer["changes"]) == 800
    assert b"/400" in screen[0]
    assert b"tenants" in screen[0]


def read_all(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # Linux reports a closed terminal as an error
            return found
        if not data:
            return found
        found += data
