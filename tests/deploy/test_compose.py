"""Compare the files for Docker Compose with the program, and run its Redis and nginx configurations."""

import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import yaml

from limitforge.service.settings import load_settings
from tests.cli.command import run_cli
from tests.deploy.deployment import (
    BIN,
    COMPOSE,
    IMAGE,
    PEPPERS,
    SPARE_SECONDS,
    VERSIONED,
    Fields,
    dockerfile,
    env_file,
    run,
    seconds,
)
from tests.nginx import Nginx
from tests.servers import RedisServer
from tests.service.live_service import LiveService


@pytest.fixture(scope="module")
def compose_config() -> Fields:
    """The file with the values of `.env.example`, as `docker compose config` shows it."""
    values = env_file(COMPOSE / ".env.example") | {"LIMITFORGE_PEPPERS": PEPPERS}

    def put_in(found: re.Match[str]) -> str:
        name, _, otherwise = found[1].partition(":")
        if otherwise.startswith("?"):
            return values[name]  # it must exist
        return values.get(name, otherwise.removeprefix("-"))

    text = re.sub(r"\$\{([^}]+)\}", put_in, (COMPOSE / "compose.yaml").read_text())
    return cast("Fields", yaml.safe_load(text))


def test_the_compose_file_matches_its_schema() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE / "compose.yaml")


def test_the_service_accepts_the_settings_of_compose(compose_config: Fields) -> None:
    services = compose_config["services"]
    settings = load_settings(services["service"]["environment"])
    assert services["migrate"]["environment"] == services["service"]["environment"]
    for name in ("service", "migrate"):
        for url, other, port in (
            (settings.store_url, "redis", 6379),
            (settings.database_url, "postgres", 5432),
        ):
            assert f"@{other}:{port}/" in url
            assert other in services
            assert set(services[name]["networks"]) & set(services[other]["networks"])
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"] in settings.database_url
    assert services["redis"]["command"][-1] in settings.store_url
    assert services["redis"]["environment"]["REDISCLI_AUTH"] == services["redis"]["command"][-1]
    assert settings.processes == settings.workers


def test_the_ports_of_compose_and_nginx_agree(compose_config: Fields) -> None:
    services, nginx = compose_config["services"], (COMPOSE / "nginx.conf").read_text()
    settings = load_settings(services["service"]["environment"])
    assert services["service"]["expose"] == [str(settings.port)]
    assert f"server service:{settings.port};" in nginx
    (listens,) = re.findall(r"listen (\d+) ssl;", nginx)
    assert services["nginx"]["ports"] == [f"127.0.0.1:{listens}:{listens}"]
    assert f"127.0.0.1:{listens}/" in services["nginx"]["healthcheck"]["test"][-1]
    assert set(services["nginx"]["networks"]) & set(services["service"]["networks"])
    assert [name for name, service in services.items() if "ports" in service] == ["nginx"]
    (kept,) = re.findall(r"keepalive_timeout (\d+)s; # below", nginx)
    assert int(kept) < settings.idle_seconds


def test_every_container_has_a_healthcheck_bounds_and_a_restart_policy(compose_config: Fields) -> None:
    services = compose_config["services"]
    for name, service in services.items():
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}, name
        assert service["logging"]["options"]["max-size"], name
        if name == "migrate":
            assert service["restart"] == "no"
        else:
            assert service["restart"] == "unless-stopped"
            assert service["healthcheck"]["retries"] > 1, name
        for other, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if other == "migrate" else "service_healthy"
            assert how["condition"] == expected, (name, other)
    assert set(services["service"]["depends_on"]) == {"migrate", "redis", "postgres"}
    assert (
        services["nginx"]["depends_on"]["service"]["restart"] is True
    )  # otherwise it connects to the previous address of the service
    settings = load_settings(services["service"]["environment"])
    assert seconds(services["service"]["stop_grace_period"]) > settings.shutdown_seconds + SPARE_SECONDS


def test_the_healthchecks_of_compose_request_existing_paths(compose_config: Fields, live: LiveService) -> None:
    paths = {}
    for name in ("service", "nginx"):
        (paths[name],) = re.findall(
            r"https?://127\.0\.0\.1:\d+([^\s\"]+)", compose_config["services"][name]["healthcheck"]["test"][-1]
        )
    assert paths == {"service": "/v1/ready", "nginx": "/v1/health"}
    for path in paths.values():
        assert live.client().http.get(path).status_code == 200


def test_the_healthcheck_of_the_service_succeeds_and_fails(compose_config: Fields, live: LiveService) -> None:
    kind, _, *arguments = compose_config["services"]["service"]["healthcheck"]["test"]
    assert kind == "CMD"
    here = [argument.replace("http://127.0.0.1:8000", live.origin) for argument in arguments]
    run(sys.executable, *here)
    nowhere = [argument.replace("/v1/ready", "/v1/nothing") for argument in here]
    assert subprocess.run([sys.executable, *nowhere], capture_output=True, check=False).returncode == 1


def test_every_file_that_compose_mounts_is_there(compose_config: Fields) -> None:
    mounted = [each for service in compose_config["services"].values() for each in service.get("volumes", ())]
    for each in mounted:
        source, target, *mode = each.split(":")
        if source.startswith("."):
            assert (COMPOSE / source).exists(), each
            assert mode == ["ro"], each
        else:
            assert source in compose_config["volumes"], each
        assert target.startswith("/")
    nginx = (COMPOSE / "nginx.conf").read_text()
    targets = [each.split(":")[1] for each in mounted]
    assert all(path.startswith(tuple(targets)) for path in re.findall(r"(/etc/nginx/\S+);", nginx))
    assert compose_config["services"]["redis"]["command"][1] in targets
    for service in compose_config["services"].values():
        assert set(service["networks"]) <= set(compose_config["networks"])


def test_every_image_is_pinned_by_its_version(compose_config: Fields) -> None:
    images = {name: service["image"] for name, service in compose_config["services"].items()}
    images |= {f"FROM {n}": image for n, image in enumerate(re.findall(r"(?m)^FROM (\S+)", dockerfile()))}
    assert len(images) == 7
    assert {name: image for name, image in images.items() if not VERSIONED.fullmatch(image)} == {}
    assert images["service"] == images["migrate"] == IMAGE


def test_the_containers_run_existing_commands(compose_config: Fields) -> None:
    services = compose_config["services"]
    for command in (services["migrate"]["command"], services["service"]["command"]):
        assert run_cli(*command, "--help").returncode == 0


def test_the_redis_of_compose_starts_and_evicts_nothing(tmp_path: Path) -> None:
    text = (COMPOSE / "redis.conf").read_text()
    assert "dir /data\n" in text
    arguments = [
        part for line in text.splitlines() if line and not line.startswith("#") for part in _option(line, tmp_path)
    ]
    with RedisServer(*arguments) as server:
        assert b"noeviction" in server.command("CONFIG GET maxmemory-policy")
        assert b"402653184" in server.command("CONFIG GET maxmemory")
        assert b"yes" in server.command("CONFIG GET appendonly")


def _option(line: str, folder: Path) -> tuple[str, str]:
    name, value = line.split(maxsplit=1)
    return f"--{name}", {"dir": str(folder), "save": ""}.get(name, value)


def test_nginx_accepts_its_configuration_without_warnings() -> None:
    with Nginx(8000) as nginx:
        output = nginx.check_configuration()
    assert "syntax is ok" in output
    assert not re.search(r"\[(warn|error|emerg|alert)\]", output), output
