"""Writes what monitors servers into deploy/: Prometheus's rules and Grafana's dashboards; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from scripts.monitoring import dashboards, rules

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"


def files() -> dict[str, str]:
    """Returns the contents of every file that is generated, by its path in deploy/."""
    return dict(rules.files()) | {f"grafana/dashboards/{name}": text for name, text in dashboards.files()}


def stale(folder: Path = DEPLOY) -> list[str]:
    """Returns the paths whose contents differ from what would be generated."""
    return sorted(
        path for path, text in files().items() if not (folder / path).exists() or (folder / path).read_text() != text
    )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file is stale")
    if parser.parse_args().check:
        if found := stale():
            sys.exit(f"stale files in deploy: {', '.join(found)}; run `make reference`")
        return
    for path, text in files().items():
        (DEPLOY / path).parent.mkdir(parents=True, exist_ok=True)
        (DEPLOY / path).write_text(text)


if __name__ == "__main__":
    main()
