"""Parse and lint the files for Docker, Kubernetes and systemd, which can't run here; compare them with the program."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from limitforge.service.settings import ENV_PREFIX, Settings, load_settings
from tests.cli.command import run_cli
from tests.nginx import Nginx
from tests.servers import RedisServer
from tests.service.live_service import LiveService

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
SYSTEMD = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "kubernetes"
BIN = Path(sys.executable).parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = f"limitforge:{PROJECT['version']}"
SPARE_SECONDS = 2.0  # the supervisor adds this to LIMITFORGE_SHUTDOWN_SECONDS
VERSIONED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
Fields = dict[str, Any]

# The API versions that current Kubernetes serves.
KINDS = {
    "Namespace": "v1",
    "ConfigMap": "v1",
    "Secret": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with LiveService(f"sqlite:///{tmp_path_factory.mktemp('deploy')}/deploy.db") as live:
        yield live


def run(*command: str | Path, folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found, text
    return float(found[1])


PEPPERS = "1:a pepper that the tests alone know"


def env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def files() -> list[Path]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "deploy"]
    named = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in named if (ROOT / name).is_file()]


# --- Everywhere ------------------------------------------------------------------------------------------------------


def test_every_named_setting_exists() -> None:
    known = {f"{ENV_PREFIX}{field.name.upper()}" for field in fields(Settings)}
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files()
        for name in re.findall(r"\bLIMITFORGE_[A-Z_]*[A-Z]", path.read_text())
    }
    assert len(named) > 20
    assert {(path, name) for path, name in named if name not in known} == set()


def test_the_yaml_is_well_formed() -> None:
    rules = (
        "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
        "braces: {min-spaces-inside: 1, max-spaces-inside: 1, min-spaces-inside-empty: 0, max-spaces-inside-empty: 0}, "
        "comments: {min-spaces-from-content: 1}}}"
    )
    run(BIN / "yamllint", "--strict", "-d", rules, DEPLOY)


def test_no_secret_is_kept_in_git() -> None:
    for secret in ("deploy/compose/.env", "deploy/compose/certs/tls.key"):
        run("git", "check-ignore", "--no-index", secret)
    for path in files():
        for name, value in re.findall(r"(?m)^\s*\w*(PASSWORD|PEPPERS)[=:][ \t]*(\S*)", path.read_text()):
            if name == "PEPPERS":  # a working example would be a pepper that everyone knows
                assert value in ("", '""') or value.startswith("${"), (path, value)
            else:
                assert "change-me" in value or value.startswith("${"), (path, value)


# --- Compose ---------------------------------------------------------------------------------------------------------


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


# --- The image -------------------------------------------------------------------------------------------------------


def dockerfile() -> str:
    return (COMPOSE / "Dockerfile").read_text()


def test_the_image_installs_extras_that_exist_under_the_constraints() -> None:
    (line,) = re.findall(r"(?m)^RUN \S+pip install .*$", dockerfile())
    (extras,) = re.findall(r"\.\[([\w,]+)\]", line)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "service" in extras
    assert "-c constraints.txt" in line


def test_the_image_copies_what_the_build_needs_and_nothing_secret() -> None:
    copied = [name for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", dockerfile()) for name in line.split()[:-1]]
    seen = re.findall(r"(?m)^!(\S+)$", (COMPOSE / "Dockerfile.dockerignore").read_text())
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(seen)
    assert {"src", "pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]} == set(copied)


def test_the_image_does_not_run_as_root_and_runs_the_program() -> None:
    (user,) = re.findall(r"(?m)^USER (\d+):\d+$", dockerfile())
    assert f"--uid {user} " in dockerfile()
    assert int(user) > 0
    assert 'ENTRYPOINT ["limitforge"]' in dockerfile()
    assert "limitforge" in PROJECT["scripts"]
    stages = re.findall(r"(?m)^FROM (\S+)", dockerfile())
    assert len(set(stages)) == 1  # a virtual environment only works with the same interpreter path
    assert stages[0].startswith("python:3.")


# --- systemd ---------------------------------------------------------------------------------------------------------


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


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@cache
def manifests() -> dict[str, Fields]:
    """Return the manifests by kind; there is one of each."""
    found: dict[str, Fields] = {}
    for path in sorted(KUBERNETES.glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            if path.name != "kustomization.yaml":
                assert each["kind"] not in found
                found[each["kind"]] = each
    return found


def pods() -> Iterator[tuple[str, Fields]]:
    for kind in ("Deployment", "Job"):
        yield kind, manifests()[kind]["spec"]["template"]


def labels_of(kind: str) -> Fields:
    return cast("Fields", dict(pods())[kind]["metadata"]["labels"])


def test_the_kustomization_names_every_manifest_but_the_example() -> None:
    made = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    there = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    assert set(made["resources"]) == there
    assert made["namespace"] == manifests()["Namespace"]["metadata"]["name"]
    assert [f"{image['name']}:{image['newTag']}" for image in made["images"]] == [IMAGE]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
def test_kustomize_builds_it() -> None:
    built = [each for each in yaml.safe_load_all(run("kubectl", "kustomize", KUBERNETES)) if each]
    assert {each["kind"] for each in built} == KINDS.keys() - {"Secret"}
    for each in built:
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "limitforge"
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == "limitforge"


def test_every_kind_has_a_served_api_version() -> None:
    assert {kind: each["apiVersion"] for kind, each in manifests().items()} == KINDS
    names = [each["metadata"]["name"] for each in manifests().values()]
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name) for name in names)


def test_every_selector_matches_only_pods_of_the_service() -> None:
    found = manifests()
    selectors = {
        "Deployment": found["Deployment"]["spec"]["selector"]["matchLabels"],
        "Service": found["Service"]["spec"]["selector"],
        "PodDisruptionBudget": found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        "spread": dict(pods())["Deployment"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    }
    for name, selector in selectors.items():
        assert selector.items() <= labels_of("Deployment").items(), name
        assert not selector.items() <= labels_of("Job").items(), name


def test_the_autoscaler_scales_the_deployment() -> None:
    found = manifests()
    spec = found["HorizontalPodAutoscaler"]["spec"]
    target = spec["scaleTargetRef"]
    assert target["kind"] == "Deployment"
    assert target["apiVersion"] == found["Deployment"]["apiVersion"]
    assert target["name"] == found["Deployment"]["metadata"]["name"]
    assert "replicas" not in found["Deployment"]["spec"]
    assert spec["minReplicas"] > found["PodDisruptionBudget"]["spec"]["maxUnavailable"]  # at least one stays available
    assert spec["maxReplicas"] == pod_settings().processes


def pod_settings() -> Settings:
    found = manifests()
    return load_settings({**found["ConfigMap"]["data"], **found["Secret"]["stringData"], "LIMITFORGE_PEPPERS": PEPPERS})


def test_the_pods_accept_their_settings() -> None:
    found = manifests()
    settings = pod_settings()
    assert settings.workers == 1
    secret = {f"{ENV_PREFIX}{field.name.upper()}" for field in fields(Settings) if field.metadata["secret"]}
    assert not secret & found["ConfigMap"]["data"].keys()
    assert found["Secret"]["stringData"].keys() == secret
    for kind, pod in pods():
        assert pod["spec"]["enableServiceLinks"] is False, kind  # otherwise LIMITFORGE_PORT becomes tcp://…
        (container,) = pod["spec"]["containers"]
        sources = container["envFrom"]
        assert sources == [
            {"configMapRef": {"name": found["ConfigMap"]["metadata"]["name"]}},
            {"secretRef": {"name": found["Secret"]["metadata"]["name"]}},
        ]
        assert container["image"] == IMAGE
        assert run_cli(*container["args"], "--help").returncode == 0


def test_the_ports_of_the_pods_match_the_settings() -> None:
    found, settings = manifests(), pod_settings()
    (container,) = dict(pods())["Deployment"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": settings.port, "metrics": settings.metrics_port}
    assert [port["targetPort"] for port in found["Service"]["spec"]["ports"]] == ["http"]
    admitted = [port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert set(admitted) == ports.keys()
    assert "0.0.0.0" == settings.host == settings.metrics_host  # noqa: S104 - of a pod


def test_the_probes_request_existing_paths(live: LiveService) -> None:
    (container,) = dict(pods())["Deployment"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/v1/health",
        "liveness": "/v1/health",
        "readiness": "/v1/ready",
    }
    for probe in probes.values():
        assert probe["port"] == "http"
        assert live.client().http.get(probe["path"]).status_code == 200


def test_a_pod_has_enough_time_to_stop() -> None:
    pod = dict(pods())["Deployment"]["spec"]
    (container,) = pod["containers"]
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits + pod_settings().shutdown_seconds + SPARE_SECONDS


def test_every_pod_is_bounded_and_hardened() -> None:
    (user,) = re.findall(r"(?m)^USER (\d+):\d+$", dockerfile())
    for kind, pod in pods():
        spec = pod["spec"]
        (container,) = spec["containers"]
        for bound in ("requests", "limits"):
            assert container["resources"][bound].keys() == {"cpu", "memory"}, kind
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == int(user)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"tmp": "/tmp"}  # noqa: S108 - the service keeps its counters in a folder there
        assert [volume["name"] for volume in spec["volumes"]] == ["tmp"]


def test_the_job_creates_the_schema_and_ends(postgres_url: str) -> None:
    job = manifests()["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["activeDeadlineSeconds"] > 0
    (container,) = job["template"]["spec"]["containers"]
    for _ in range(2):  # running it again is fine
        done = run_cli(*container["args"], LIMITFORGE_DATABASE_URL=postgres_url)
        assert done.returncode == 0, done.stderr
    status = run_cli("db", "status", LIMITFORGE_DATABASE_URL=postgres_url)
    assert "the newest" in status.stdout


def test_a_pod_without_the_schema_exits_with_the_missing_step(postgres_url: str) -> None:
    done = run_cli("serve", "--port", "0", "--database", postgres_url, LIMITFORGE_PEPPERS=PEPPERS)
    assert done.returncode == 2
    assert "limitforge db upgrade" in done.stderr
