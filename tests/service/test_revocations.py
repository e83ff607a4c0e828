"""A key revoked on the command line while a large file is applied, with several workers, Postgres and Redis."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import ENVIRONMENT, INSTALLED_PROGRAM, run_cli
from tests.service.live_service import PEPPERS
from tests.service.program import RunningService, run_service

TENANTS = 1_000
IN_A_ROW = 20  # refusals that show that every worker knows of the revocation


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def refused_everywhere(running: RunningService, key: str) -> float:
    """Wait until every worker refuses the key, and return how many seconds that took."""
    began = time.monotonic()
    last_allowed, refused = began, 0
    while refused < IN_A_ROW:
        assert time.monotonic() - began < 60, "it is still let in"
        status = running.check(key).status
        assert status in (200, 403)
        refused = refused + 1 if status == 403 else 0
        if status == 200:
            last_allowed = time.monotonic()
    return last_allowed - began


@pytest.mark.timeout(180)
def test_a_revocation_during_and_after_a_large_apply_acts_at_once(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    environment = {
        "LIMITFORGE_DATABASE_URL": postgres_url,
        "LIMITFORGE_STORE_URL": redis_url,
        "LIMITFORGE_PEPPERS": PEPPERS,
    }

    def run(*arguments: str) -> str:
        done = run_cli(*arguments, stdin=None, folder=None, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    file = tmp_path / "large.yaml"
    tenants = (
        f"  - {{name: bulk-{index}, plans: [{{name: a, limits: 5/s}}], policies: [{{resource: '*', plan: a}}]}}\n"
        for index in range(TENANTS)
    )
    file.write_text("tenants:\n" + "".join(tenants))
    run("db", "upgrade")
    run("tenants", "create", "acme")
    keys = [json.loads(run("keys", "create", f"k{index}", "--tenant", "acme", "--json")) for index in range(2)]
    log = tmp_path / "serve.log"
    with run_service(free_port(), "--workers", "2", environment=environment, log=log) as running:
        for key in keys:
            for _ in range(IN_A_ROW):
                assert running.check(key["key"]).status == 200
        with subprocess.Popen(
            [INSTALLED_PROGRAM, "apply", str(file)], env=ENVIRONMENT | environment, stdout=subprocess.DEVNULL
        ) as applying:
            while len(json.loads(run("tenants", "list", "--json"))) < 50:
                assert applying.poll() is None
            run("keys", "disable", keys[0]["id"])
            assert refused_everywhere(running, keys[0]["key"]) < 30  # it once took a minute
            assert applying.wait(120) == 0
        run("keys", "disable", keys[1]["id"])
        assert refused_everywhere(running, keys[1]["key"]) < 30
    assert "Traceback" not in log.read_text()
