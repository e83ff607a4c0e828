"""Services of others, if the environment names their programs: envoyproxy/ratelimit, limitador and gubernator.

They decide about the limits and do nothing else: nobody presents a key, and there is no policy to find.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.server import free_port
from bench.service.contest import Contestant, Door, Site
from bench.service.plans import PLANS
from bench.service.process import running
from bench.service.wrk import SUBJECT, Ask

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
def _ratelimit(site: Site) -> Iterator[Door]:
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

    def ask(plan: str) -> Ask:
        entries = [{"entries": [{"key": f"{plan}-{limit.unit}", "value": f"u{SUBJECT}"}]} for limit in PLANS[plan]]
        body = json.dumps({"domain": "bench", "descriptors": entries})
        return Ask(f"http://127.0.0.1:{port}/json", headers=_JSON, body=body)

    with running([str(_program(RATELIMIT))], port, site.folder, environment) as pid:
        yield Door(pid, ask)


@contextmanager
def _limitador(site: Site) -> Iterator[Door]:
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

    def ask(plan: str) -> Ask:
        body = {"namespace": plan, "values": {"user": f"u{SUBJECT}"}, "delta": 1}
        headers = {"response_headers": "DRAFT_VERSION_03"}
        return Ask(f"http://127.0.0.1:{port}/check_and_report", headers=_JSON, body=json.dumps(body | headers))

    with running(command, port, site.folder, {}) as pid:
        yield Door(pid, ask)


@contextmanager
def _gubernator(site: Site) -> Iterator[Door]:
    """It keeps its counters itself, and answers 200 to whatever it decides. One that runs already has the port 7946, at
    which it would look for others of its kind: then it does not start.
    """
    port, other = free_port(), free_port()
    environment = {
        "GUBER_HTTP_ADDRESS": f"127.0.0.1:{port}",
        "GUBER_GRPC_ADDRESS": f"127.0.0.1:{other}",
        "GUBER_ADVERTISE_ADDRESS": f"127.0.0.1:{other}",
        "GUBER_CACHE_SIZE": "200000",
        "GUBER_LOG_LEVEL": "error",
    }

    def ask(plan: str) -> Ask:
        requests = [
            {
                "name": f"{plan}-{limit.unit}",
                "uniqueKey": f"u{SUBJECT}",
                "hits": "1",
                "limit": str(limit.amount),
                "duration": str(1_000 * limit.seconds),
            }
            for limit in PLANS[plan]
        ]
        body = json.dumps({"requests": requests})
        return Ask(f"http://127.0.0.1:{port}/v1/GetRateLimits", headers=_JSON, body=body, denial="OVER_LIMIT")

    with running([str(_program(GUBERNATOR))], port, site.folder, environment) as pid:
        yield Door(pid, ask)


def _program(name: str) -> Path:
    return Path(os.environ.get(VARIABLES[name]) or "absent")


def _address(site: Site) -> str:
    return site.redis_url.removeprefix("redis://").partition("/")[0]
