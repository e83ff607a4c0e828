"""Run the benchmarks: `python -m bench [PART ...] [--quick] [--json FILE] [--plot FILE]`. The default is all parts."""

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
    options = _parse_options()
    started = time.monotonic()
    found: list[Target] = []
    report: dict[str, Any] = {"quick": options.quick, "versions": _versions()}
    try:
        for part in options.parts or PARTS:
            results, rendered, part_targets = _run(part, report["versions"], quick=options.quick)
            print(f"\n{rendered}", flush=True)
            report[part] = [asdict(result) for result in results]
            found += part_targets
            if part in PLOTS and options.plot:
                file = _plot_file(options.plot, part, options.parts)
                file.write_text(PLOTS[part](results, report["versions"]))
                print(f"written to {file}\n")
    except ServerUnavailable as missing:
        print(f"bench: {missing}", file=sys.stderr)
        return 1
    print(f"{targets(found)}")
    print(", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    report["targets"] = [asdict(target) for target in found]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s; written to {options.json}")
    return 0


def _run(part: str, versions: dict[str, str], *, quick: bool) -> tuple[list[Any], str, list[Target]]:
    if part == "memory":
        memory_results, part_targets = memory.run(quick=quick)
        return memory_results, memory.render(memory_results), part_targets
    if part == "catalog":
        catalog_results, part_targets = catalog.run(quick=quick)
        return catalog_results, catalog.render(catalog_results), part_targets
    with redis_server() as url:
        versions["redis-server"] = server_version(url)
        if part == "redis":
            redis_results, part_targets = redis_cpu.run(url, quick=quick)
            return redis_results, redis_cpu.render(redis_results), part_targets
        if part == "library":
            library_results = run_library(url, quick=quick)
            return library_results, library.render(library_results), library.targets(library_results)
        if part == "scale":
            scale_results = run_scale(url, quick=quick)
            return scale_results, scale.render(scale_results), scale.targets(scale_results)
        if part == "service":
            versions |= _package_versions("slowapi", "fastapi", "uvicorn") | {"wrk": wrk.version()}
            service_results = run_service(url, quick=quick)
            return service_results, service.render(service_results), service.targets(service_results)
        footprint_results, part_targets = footprint.run(url, quick=quick)
        return footprint_results, footprint.render(footprint_results), part_targets


def _plot_file(options: Path, part: str, parts: list[str]) -> Path:
    """Return the file of a part's plot: the given name for `library` or a single part, otherwise with the part's name
    added.
    """
    return options if part == "library" or parts == [part] else options.with_stem(f"{options.stem}-{part}")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench", description="limitforge beside its peers, in one run.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; without one, all")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its numbers mean little")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="FILE", help="where results go")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where library, scale or service draws its SVG")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"no part is called {part!r}; there are {', '.join(PARTS)}")
    return options


def _versions() -> dict[str, str]:
    packages = ("limitforge", "limits", "throttled-py", "pyrate-limiter", "redis", "hiredis", "uvloop")
    return {"python": platform.python_version()} | _package_versions(*packages)


def _package_versions(*packages: str) -> dict[str, str]:
    return {"redis-py" if package == "redis" else package: version(package) for package in packages}


if __name__ == "__main__":
    sys.exit(main())
