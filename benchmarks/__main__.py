"""``python -m benchmarks``: every benchmark, each in a process of its own; ``--quick``, ``--only tracing,flush``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch

BENCHMARKS = (
    "dispatch_call",
    "native",
    "tracing",
    "flush",
    "steps",
    "parts",
    "overlap",
    "memory",
    "compile_frontend",
    "recurrent",
    "partial",
    "jax_limit",
    "aot",
)


def main(argv: list[str] | None = None) -> int:
    """Run them; returns how many failed."""
    parser = argparse.ArgumentParser(description="ratios against peers measured in the same process")
    parser.add_argument("--quick", action="store_true", help="a few minutes instead of an hour")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}")
    options = parser.parse_args(argv)
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores", flush=True)
    print(f"load before: {os.getloadavg()[0]:.1f} (ratios hold up to about the number of cores)", flush=True)
    failed = 0
    for name in wanted:
        print(f"\n== {name}", flush=True)
        quick = ["--quick"] if options.quick and name != "dispatch_call" else []
        failed += subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *quick], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
