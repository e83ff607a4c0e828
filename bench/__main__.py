"""`python -m bench [PART ...] [--quick] [--json FILE] [--plot FILE]`: without a part, all of them."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import catalog, footprint, memory, plot, redis_cpu
from bench.library import report as library
from bench.library.run import run as run_library
from bench.scale import plot as scale_plot
from bench.scale import report as scale
from bench.scale.run import run as run_scale
from bench.server import ServerUnavailable, redis_server, server_version
from bench.service import plot as service_plot
from bench.service import report as service
from bench.service import wrk
from bench.service.run import run as run_service
from bench.table import Target, targets

PARTS = ("memory", "redis", "bytes", "library", "scale", "catalog", "service")
PLOTS: dict[str, Callable[[list[Any], dict[str, str]], str]] = {
    "library": plot.render_svg,
    "scale": scale_plot.render_svg,
    "service": service_plot.render_svg,
}


def main() -> int:
    asked = _arguments()
    started = time.monotonic()
    found: list[Target] = []
    report: dict[str, Any] = {"quick": asked.quick, "versions": _versions()}
    try:
        for part in asked.parts or PARTS:
            results, drawn, its_targets = _run(part, report["versions"], quick=asked.quick)
            print(f"\n{drawn}", flush=True)
            report[part] = [asdict(result) for result in results]
            found += its_targets
            if part in PLOTS and asked.plot:
                file = _plot_file(asked.plot, part, asked.parts)
                file.write_text(PLOTS[part](results, report["versions"]))
                print(f"drawn to {file}\n")
    except ServerUnavailable as missing:
        print(f"bench: {missing}", file=sys.stderr)
        return 1
    print(f"{targets(found)}")
    print(", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    report["targets"] = [asdict(target) for target in found]
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; written to {asked.json}")
    return 0


def _run(part: str, versions: dict[str, str], *, quick: bool) -> tuple[list[Any], str, list[Target]]:
    if part == "memory":
        in_memory, its_targets = memory.run(quick=quick)
        return in_memory, memory.render(in_memory), its_targets
    if part == "catalog":
        of_catalog, its_targets = catalog.run(quick=quick)
        return of_catalog, catalog.render(of_catalog), its_targets
    with redis_server() as url:
        versions["redis-server"] = server_version(url)
        if part == "redis":
            on_redis, its_targets = redis_cpu.run(url, quick=quick)
            return on_redis, redis_cpu.render(on_redis), its_targets
        if part == "library":
            beside_peers = run_library(url, quick=quick)
            return beside_peers, library.render(beside_peers), library.targets(beside_peers)
        if part == "scale":
            scaled = run_scale(url, quick=quick)
            return scaled, scale.render(scaled), scale.targets(scaled)
        if part == "service":
            versions |= _package_versions("slowapi", "fastapi", "uvicorn") | {"wrk": wrk.version()}
            served = run_service(url, quick=quick)
            return served, service.render(served), service.targets(served)
        in_bytes, its_targets = footprint.run(url, quick=quick)
        return in_bytes, footprint.render(in_bytes), its_targets


def _plot_file(asked: Path, part: str, parts: list[str]) -> Path:
    """The library's plot has the name that was asked for; that of another part beside it has the part's as well."""
    return asked if part == "library" or parts == [part] else asked.with_stem(f"{asked.stem}-{part}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench", description="limitforge beside its peers, in one run.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; without one, all")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its numbers mean little")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="FILE", help="where results go")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where library, scale or service draws its SVG")
    asked = parser.parse_args()
    for part in asked.parts:
        if part not in PARTS:
            parser.error(f"no part is called {part!r}; there are {', '.join(PARTS)}")
    return asked


def _versions() -> dict[str, str]:
    packages = ("limitforge", "limits", "throttled-py", "pyrate-limiter", "redis", "hiredis", "uvloop")
    return {"python": platform.python_version()} | _package_versions(*packages)


def _package_versions(*packages: str) -> dict[str, str]:
    return {"redis-py" if package == "redis" else package: version(package) for package in packages}


if __name__ == "__main__":
    sys.exit(main())
