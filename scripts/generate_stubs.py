"""Generates the Python stubs of proto/xlaserve_proto; `--check` only compares, and fails when they are stale."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = ROOT / "xlaserve_proto"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Writes the stubs below `out`, as xlaserve_proto/*."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    protos = sorted(str(path.relative_to(ROOT)) for path in PACKAGE.glob("*.proto"))
    plugins = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"-I{well_known}"]
    command += [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    subprocess.run([*command, *protos], check=True, env=plugins, stderr=subprocess.DEVNULL)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the generated files in `folder` by name."""
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the stubs are stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = contents(Path(scratch) / PACKAGE.name), contents(PACKAGE)
    stale = sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))
    if stale:
        sys.exit(f"stale stubs: {', '.join(stale)}; run `make stubs`")
    print(f"{len(fresh)} stubs are fresh")


if __name__ == "__main__":
    main()
