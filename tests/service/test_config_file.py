"""A service with a configuration file has no database and no admin API."""

import json
import time
from pathlib import Path

from tests.cli.command import run_cli
from tests.servers import find_free_port
from tests.service.program import run_service

PEPPERS = {"LIMITFORGE_PEPPERS": "1:a pepper that the tests alone know"}


def test_a_file_is_served_and_followed_without_a_restart(tmp_path: Path) -> None:
    made = run_cli("keys", "make", "--name", "web", "--json", LIMITFORGE_PEPPERS=PEPPERS["LIMITFORGE_PEPPERS"])
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout)
    file = tmp_path / "plans.yaml"

    def write(limit: int) -> None:
        plan = {"name": "free", "limits": f"a={limit}/minute"}
        tenant = {"name": "acme", "default_plan": "free", "plans": [plan], "keys": [key["entry"]]}
        file.write_text(json.dumps({"tenants": [tenant]}))

    write(5)
    log = tmp_path / "log"
    with run_service(find_free_port(), "--config", str(file), environment=PEPPERS, log=log) as service:
        assert service.check(key=key["key"]).json["limit"] == 5
        assert service.request("GET", "/v1/admin/tenants").status == 404
        file.write_text("{")
        deadline = time.monotonic() + 30
        while (ready := service.request("GET", "/v1/ready").json)["status"] != "degraded":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert set(ready["catalog"]) == {
            "state",
            "since",
        }  # the reason is only in the log, because anyone may call this
        assert "plans.yaml" in log.read_text()
        assert service.check(key=key["key"]).json["limit"] == 5
        write(7)
        while service.check(key=key["key"], cost=0).json["limit"] != 7:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert service.request("GET", "/v1/ready").json["status"] == "ok"
