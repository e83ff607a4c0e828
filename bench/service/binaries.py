"""The services envoyproxy/ratelimit, limitador and gubernator, if environment variables name their programs.

They only decide limits: no key is verified and no policy is matched.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.server import free_port
from bench.service.contestants import BenchEnvironment, Contestant, RunningContestant
from bench.service.plans import PLANS
from bench.service.process import running_server
from bench.service.wrk import SUBJECT_PLACEHOLDER, RequestTemplate

RATELIMIT, LIMITADOR, GUBERNATOR = "envoyproxy/ratelimit", "limitador", "gubernator"
VARIABLES = {RATELIMIT: "RATELIMIT_BIN", LIMITADOR: "LIMITADOR_BIN", GUBERNATOR: "GUBERNATOR_BIN"}

_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Absent:
    contestant: str
    variable: str
    kind: str = "absent"


def contestants() -> tuple[Contestant, ...]:
    opened = {RATELIMIT: _ratelimit, LIMITADOR: _limitador, GUBERNATOR: _gubernator}
    return tuple(Contestant(name, opened[name]) for name in VARIABLES if _program(name).is_file())


def absent() -> list[Absent]:
    return [Absent(name, variable) for name, variable in VARIABLES.items() if not _program(name).is_file()]


@contextmanager
def _ratelimit(site: BenchEnvironment) -> Iterator[RunningContestant]:
    port, others = free_port(), (free_port(), free_port())
    folder = site.folder / "ratelimit" / "limits" / "config"
    folder.mkdir(parents=True)
    descriptors = [
        {"key": f"{plan}-{limit.unit}", "rate_limit": {"unit": limit.unit, "requests_per_unit": limit.amount}}
        for plan, limits in PLANS.items()
        for limit in limits
    ]
    (folder / "bench.yaml").write_text(json.dumps({"domain": "bench", "descriptors": descriptors}))
    environment = {
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "GRPC_HOST": "127.0.0.1",
        "GRPC_PORT": str(others[0]),
        "DEBUG_HOST": "127.0.0.1",
        "DEBUG_PORT": str(others[1]),
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": _address(site),
        "RUNTIME_ROOT": str(site.folder / "ratelimit"),
        "RUNTIME_SUBDIRECTORY": "limits",
        "RUNTIME_WATCH_ROOT": "false",
        "USE_STATSD": "false",
        "LOG_LEVEL": "error",
    }

    def request_template(plan: str) -> RequestTemplate:
        entries = [
            {"entries": [{"key": f"{plan}-{limit.unit}", "value": f"u{SUBJECT_PLACEHOLDER}"}]} for limit in PLANS[plan]
        ]
        body = json.dumps({"domain": "bench", "descriptors": entries})
        return RequestTemplate(f"http://127.0.0.1:{port}/json", headers=_JSON, body=body)

    with running_server([str(_program(RATELIMIT))], port, site.folder, environment) as pid:
        yield RunningContestant(pid, request_template)


@contextmanager
def _limitador(site: BenchEnvironment) -> Iterator[RunningContestant]:
    port, other = free_port(), free_port()
    limits = [
        {
            "namespace": plan,
            "max_value": limit.amount,
            "seconds": limit.seconds,
            "conditions": [],
            "variables": ["descriptors[0].user"],
        }
        for plan, limits in PLANS.items()
        for limit in limits
    ]
    file = site.folder / "limitador.yaml"
    file.write_text(json.dumps(limits))
    where = ["-b", "127.0.0.1", "-p", str(other), "-B", "127.0.0.1", "-P", str(port)]
    command = [str(_program(LIMITADOR)), *where, str(file), "redis", f"redis://{_address(site)}"]

    def request_template(plan: str) -> RequestTemplate:
        body = {"namespace": plan, "values": {"user": f"u{SUBJECT_PLACEHOLDER}"}, "delta": 1}
        headers = {"response_headers": "DRAFT_VERSION_03"}
        return RequestTemplate(
            f"http://127.0.0.1:{port}/check_and_report", headers=_JSON, body=json.dumps(body | headers)
        )

    with running_server(command, port, site.folder, {}) as pid:
        yield RunningContestant(pid, request_template)


@contextmanager
def _gubernator(site: BenchEnvironment) -> Iterator[RunningContestant]:
    """Run gubernator, which keeps its counters in its own memory and answers every decision with 200.

    If another one is running, port 7946, which it uses to find its peers, is taken, and it does not start.
    """
    port, other = free_port(), free_port()
    environment = {
        "GUBER_HTTP_ADDRESS": f"127.0.0.1:{port}",
        "GUBER_GRPC_ADDRESS": f"127.0.0.1:{other}",
        "GUBER_ADVERTISE_ADDRESS": f"127.0.0.1:{other}",
        "GUBER_CACHE_SIZE": "200000",
        "GUBER_LOG_LEVEL": "error",
    }

    def request_template(plan: str) -> RequestTemplate:
        requests = [
            {
                "name": f"{plan}-{limit.unit}",
                "uniqueKey": f"u{SUBJECT_PLACEHOLDER}",
                "hits": "1",
                "limit": str(limit.amount),
                "duration": str(1_000 * limit.seconds),
            }
            for limit in PLANS[plan]
        ]
        body = json.dumps({"requests": requests})
        return RequestTemplate(
            f"http://127.0.0.1:{port}/v1/GetRateLimits", headers=_JSON, body=body, denial_text="OVER_LIMIT"
        )

    with running_server([str(_program(GUBERNATOR))], port, site.folder, environment) as pid:
        yield RunningContestant(pid, request_template)


def _program(name: str) -> Path:
    return Path(os.environ.get(VARIABLES[name]) or "absent")


def _address(site: BenchEnvironment) -> str:
    return site.redis_url.removeprefix("redis://").partition("/")[0]
