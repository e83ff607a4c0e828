"""Lint the Kubernetes manifests, and compare them with the program."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import cast

import pytest
import yaml

from limitforge.service.settings import ENV_PREFIX, Settings, load_settings
from tests.cli.command import run_cli
from tests.deploy.deployment import IMAGE, KUBERNETES, PEPPERS, SPARE_SECONDS, Fields, image_user, run
from tests.service.live_service import LiveService

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
    for kind, pod in pods():
        spec = pod["spec"]
        (container,) = spec["containers"]
        for bound in ("requests", "limits"):
            assert container["resources"][bound].keys() == {"cpu", "memory"}, kind
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == image_user()
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
