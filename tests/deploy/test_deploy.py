"""What can't be run here (a Docker, a Kubernetes, a systemd) is parsed, linted, and held against the program itself."""

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
SPARE_SECONDS = 2.0  # what the parent of the workers adds to LIMITFORGE_SHUTDOWN_SECONDS
VERSIONED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
Fields = dict[str, Any]

# What a Kubernetes of today serves.
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


def test_every_setting_that_is_named_is_one() -> None:
    known = {f"{ENV_PREFIX}{field.name.upper()}" for field in fields(Settings)}
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files()
        for name in re.findall(r"\bLIMITFORGE_[A-Z_]*[A-Z]", path.read_text())
    }
    assert len(named) > 20
    assert {(path, name) for path, name in named if name not in known} == set()


def test_the_yaml_is_in_order() -> None:
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
            if name == "PEPPERS":  # an example that works would be a pepper that everybody knows
                assert value in ("", '""') or value.startswith("${"), (path, value)
            else:
                assert "change-me" in value or value.startswith("${"), (path, value)


# --- Compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def composed() -> Fields:
    """The file with `.env.example` put in, as `docker compose config` would show it."""
    values = env_file(COMPOSE / ".env.example") | {"LIMITFORGE_PEPPERS": PEPPERS}

    def put_in(found: re.Match[str]) -> str:
        name, _, otherwise = found[1].partition(":")
        if otherwise.startswith("?"):
            return values[name]  # it must be there
        return values.get(name, otherwise.removeprefix("-"))

    text = re.sub(r"\$\{([^}]+)\}", put_in, (COMPOSE / "compose.yaml").read_text())
    return cast("Fields", yaml.safe_load(text))


def test_compose_is_what_its_schema_says() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE / "compose.yaml")


def test_the_service_would_start_with_what_compose_tells_it(composed: Fields) -> None:
    services = composed["services"]
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


def test_the_ports_of_compose_and_nginx_agree(composed: Fields) -> None:
    services, nginx = composed["services"], (COMPOSE / "nginx.conf").read_text()
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


def test_what_compose_starts_is_checked_bounded_and_started_again(composed: Fields) -> None:
    services = composed["services"]
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
    assert services["nginx"]["depends_on"]["service"]["restart"] is True  # or it asks where the service was before
    settings = load_settings(services["service"]["environment"])
    assert seconds(services["service"]["stop_grace_period"]) > settings.shutdown_seconds + SPARE_SECONDS


def test_the_healthchecks_of_compose_ask_for_what_there_is(composed: Fields, live: LiveService) -> None:
    asked = {}
    for name in ("service", "nginx"):
        (asked[name],) = re.findall(
            r"https?://127\.0\.0\.1:\d+([^\s\"]+)", composed["services"][name]["healthcheck"]["test"][-1]
        )
    assert asked == {"service": "/v1/ready", "nginx": "/v1/health"}
    for path in asked.values():
        assert live.client().http.get(path).status_code == 200


def test_the_healthcheck_of_the_service_succeeds_and_fails(composed: Fields, live: LiveService) -> None:
    kind, _, *arguments = composed["services"]["service"]["healthcheck"]["test"]
    assert kind == "CMD"
    here = [argument.replace("http://127.0.0.1:8000", live.origin) for argument in arguments]
    run(sys.executable, *here)
    nowhere = [argument.replace("/v1/ready", "/v1/nothing") for argument in here]
    assert subprocess.run([sys.executable, *nowhere], capture_output=True, check=False).returncode == 1


def test_every_file_that_compose_mounts_is_there(composed: Fields) -> None:
    mounted = [each for service in composed["services"].values() for each in service.get("volumes", ())]
    for each in mounted:
        source, target, *mode = each.split(":")
        if source.startswith("."):
            assert (COMPOSE / source).exists(), each
            assert mode == ["ro"], each
        else:
            assert source in composed["volumes"], each
        assert target.startswith("/")
    nginx = (COMPOSE / "nginx.conf").read_text()
    targets = [each.split(":")[1] for each in mounted]
    assert all(path.startswith(tuple(targets)) for path in re.findall(r"(/etc/nginx/\S+);", nginx))
    assert composed["services"]["redis"]["command"][1] in targets
    for service in composed["services"].values():
        assert set(service["networks"]) <= set(composed["networks"])


def test_every_image_is_pinned_by_its_version(composed: Fields) -> None:
    images = {name: service["image"] for name, service in composed["services"].items()}
    images |= {f"FROM {n}": image for n, image in enumerate(re.findall(r"(?m)^FROM (\S+)", dockerfile()))}
    assert len(images) == 7
    assert {name: image for name, image in images.items() if not VERSIONED.fullmatch(image)} == {}
    assert images["service"] == images["migrate"] == IMAGE


def test_the_commands_of_the_containers_are_commands_of_ours(composed: Fields) -> None:
    services = composed["services"]
    for command in (services["migrate"]["command"], services["service"]["command"]):
        assert run_cli(*command, "--help").returncode == 0


def test_the_redis_of_compose_starts_and_drops_nothing(tmp_path: Path) -> None:
    text = (COMPOSE / "redis.conf").read_text()
    assert "dir /data\n" in text
    told = [part for line in text.splitlines() if line and not line.startswith("#") for part in _option(line, tmp_path)]
    with RedisServer(*told) as server:
        assert b"noeviction" in server.command("CONFIG GET maxmemory-policy")
        assert b"402653184" in server.command("CONFIG GET maxmemory")
        assert b"yes" in server.command("CONFIG GET appendonly")


def _option(line: str, folder: Path) -> tuple[str, str]:
    name, value = line.split(maxsplit=1)
    return f"--{name}", {"dir": str(folder), "save": ""}.get(name, value)


def test_nginx_takes_its_configuration_without_a_word() -> None:
    with Nginx(8000) as nginx:
        said = nginx.check_configuration()
    assert "syntax is ok" in said
    assert not re.search(r"\[(warn|error|emerg|alert)\]", said), said


# --- The image -------------------------------------------------------------------------------------------------------


def dockerfile() -> str:
    return (COMPOSE / "Dockerfile").read_text()


def test_the_image_installs_extras_that_exist_under_the_constraints() -> None:
    (line,) = re.findall(r"(?m)^RUN \S+pip install .*$", dockerfile())
    (extras,) = re.findall(r"\.\[([\w,]+)\]", line)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "service" in extras
    assert "-c constraints.txt" in line


def test_the_image_copies_what_the_build_needs_and_may_see() -> None:
    copied = [name for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", dockerfile()) for name in line.split()[:-1]]
    seen = re.findall(r"(?m)^!(\S+)$", (COMPOSE / "Dockerfile.dockerignore").read_text())
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) == set(seen)
    assert {"src", "pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]} == set(copied)


def test_the_image_is_not_run_by_root_and_runs_the_program() -> None:
    (user,) = re.findall(r"(?m)^USER (\d+):\d+$", dockerfile())
    assert f"--uid {user} " in dockerfile()
    assert int(user) > 0
    assert 'ENTRYPOINT ["limitforge"]' in dockerfile()
    assert "limitforge" in PROJECT["scripts"]
    stages = re.findall(r"(?m)^FROM (\S+)", dockerfile())
    assert len(set(stages)) == 1  # a virtual environment moves only between equal ones
    assert stages[0].startswith("python:3.")


# --- systemd ---------------------------------------------------------------------------------------------------------


def unit(name: str) -> dict[str, list[str]]:
    """What each option is set to, as often as it is."""
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
def test_a_unit_runs_a_command_of_ours_and_may_do_little(name: str) -> None:
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


def test_the_units_come_in_order_and_end_in_time() -> None:
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
def test_systemd_has_nothing_to_say_to_the_units(tmp_path: Path) -> None:
    units = sorted(SYSTEMD.glob("*.service"))
    assert len(units) == 2
    for path in units:
        text = path.read_text()
        assert "/opt/limitforge/bin/limitforge " in text
        (tmp_path / path.name).write_text(text.replace("/opt/limitforge/bin/limitforge ", f"{BIN}/limitforge "))
    said = run("systemd-analyze", "verify", "--man=no", *(f"./{path.name}" for path in units), folder=tmp_path)
    ours = [line for line in said.splitlines() if "limitforge" in line]
    assert ours == []
    for path in units:  # 0 is safe, 100 is open
        run("systemd-analyze", "security", "--offline=true", "--threshold=20", f"./{path.name}", folder=tmp_path)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@cache
def manifests() -> dict[str, Fields]:
    """By kind; there is one of each."""
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


def test_every_kind_is_known_and_of_a_version_that_is_served() -> None:
    assert {kind: each["apiVersion"] for kind, each in manifests().items()} == KINDS
    names = [each["metadata"]["name"] for each in manifests().values()]
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name) for name in names)


def test_whoever_selects_pods_selects_those_of_the_service_alone() -> None:
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
    assert spec["minReplicas"] > found["PodDisruptionBudget"]["spec"]["maxUnavailable"]  # one is left at any time
    assert spec["maxReplicas"] == told().processes


def told() -> Settings:
    found = manifests()
    return load_settings({**found["ConfigMap"]["data"], **found["Secret"]["stringData"], "LIMITFORGE_PEPPERS": PEPPERS})


def test_the_pods_would_start_with_what_they_are_told() -> None:
    found = manifests()
    settings = told()
    assert settings.workers == 1
    secret = {f"{ENV_PREFIX}{field.name.upper()}" for field in fields(Settings) if field.metadata["secret"]}
    assert not secret & found["ConfigMap"]["data"].keys()
    assert found["Secret"]["stringData"].keys() == secret
    for kind, pod in pods():
        assert pod["spec"]["enableServiceLinks"] is False, kind  # or LIMITFORGE_PORT becomes tcp://…
        (container,) = pod["spec"]["containers"]
        sources = container["envFrom"]
        assert sources == [
            {"configMapRef": {"name": found["ConfigMap"]["metadata"]["name"]}},
            {"secretRef": {"name": found["Secret"]["metadata"]["name"]}},
        ]
        assert container["image"] == IMAGE
        assert run_cli(*container["args"], "--help").returncode == 0


def test_the_ports_of_the_pods_are_those_of_the_settings() -> None:
    found, settings = manifests(), told()
    (container,) = dict(pods())["Deployment"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": settings.port, "metrics": settings.metrics_port}
    assert [port["targetPort"] for port in found["Service"]["spec"]["ports"]] == ["http"]
    admitted = [port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert set(admitted) == ports.keys()
    assert "0.0.0.0" == settings.host == settings.metrics_host  # noqa: S104 - of a pod


def test_the_probes_ask_for_what_there_is(live: LiveService) -> None:
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


def test_a_pod_has_the_time_to_end() -> None:
    pod = dict(pods())["Deployment"]["spec"]
    (container,) = pod["containers"]
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits + told().shutdown_seconds + SPARE_SECONDS


def test_every_pod_is_bounded_and_may_do_little() -> None:
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


def test_the_job_ends_and_makes_the_schema(postgres_url: str) -> None:
    job = manifests()["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["activeDeadlineSeconds"] > 0
    (container,) = job["template"]["spec"]["containers"]
    for _ in range(2):  # again is no mistake
        done = run_cli(*container["args"], LIMITFORGE_DATABASE_URL=postgres_url)
        assert done.returncode == 0, done.stderr
    status = run_cli("db", "status", LIMITFORGE_DATABASE_URL=postgres_url)
    assert "the newest" in status.stdout


def test_a_pod_that_comes_before_the_schema_ends_and_says_what_is_missing(postgres_url: str) -> None:
    done = run_cli("serve", "--port", "0", "--database", postgres_url, LIMITFORGE_PEPPERS=PEPPERS)
    assert done.returncode == 2
    assert "limitforge db upgrade" in done.stderr
