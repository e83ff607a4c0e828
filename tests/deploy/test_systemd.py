"""Lint the systemd units, and compare them with the program."""

import shutil
from pathlib import Path

import pytest

from limitforge.service.settings import load_settings
from tests.cli.command import run_cli
from tests.deploy.deployment import BIN, PROJECT, SPARE_SECONDS, SYSTEMD, env_file, run, seconds


def unit(name: str) -> dict[str, list[str]]:
    """Return the values of each option; an option may occur several times."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            assert section in ("[Unit]", "[Service]", "[Install]"), line
            option, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(option, []).append(value)
    return found


@pytest.mark.parametrize("name", ["limitforge.service", "limitforge-migrate.service"])
def test_a_unit_runs_an_existing_command_and_is_hardened(name: str) -> None:
    found = unit(name)
    program, *arguments = found["ExecStart"][0].split()
    assert Path(program).name in PROJECT["scripts"]
    assert run_cli(*arguments, "--help").returncode == 0
    assert found["EnvironmentFile"] == ["/etc/limitforge/limitforge.env"]
    for option, value in {
        "DynamicUser": "yes",
        "User": "limitforge",
        "StateDirectory": "limitforge",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "CapabilityBoundingSet": "",
    }.items():
        assert found[option] == [value], option


def test_the_units_start_in_order_and_stop_in_time() -> None:
    service, migrate = unit("limitforge.service"), unit("limitforge-migrate.service")
    assert service["Requires"] == ["limitforge-migrate.service"]
    assert "limitforge-migrate.service" in service["After"][0].split()
    assert migrate["Type"] == ["oneshot"]
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert service["Restart"] == ["on-failure"]
    assert int(service["LimitNOFILE"][0]) >= 65_536
    settings = load_settings(env_file(SYSTEMD / "limitforge.env.example"))
    assert seconds(service["TimeoutStopSec"][0]) > settings.shutdown_seconds + SPARE_SECONDS
    assert settings.host == "127.0.0.1"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_has_no_complaint_about_the_units(tmp_path: Path) -> None:
    units = sorted(SYSTEMD.glob("*.service"))
    assert len(units) == 2
    for path in units:
        text = path.read_text()
        assert "/opt/limitforge/bin/limitforge " in text
        (tmp_path / path.name).write_text(text.replace("/opt/limitforge/bin/limitforge ", f"{BIN}/limitforge "))
    output = run("systemd-analyze", "verify", "--man=no", *(f"./{path.name}" for path in units), folder=tmp_path)
    ours = [line for line in output.splitlines() if "limitforge" in line]
    assert ours == []
    for path in units:  # 0 is safe, 100 is open
        run("systemd-analyze", "security", "--offline=true", "--threshold=20", f"./{path.name}", folder=tmp_path)
