"""The `loadtest` command, also as `python -m xlaserve_loadtest`."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> int:
    """Runs the command and returns its exit status: 1 where what it needs is not installed, 130 after Ctrl-C."""
    if not all(map(find_spec, ("markupsafe", "plotly", "pynvml"))):
        sys.stderr.write("loadtest needs xlaserve[loadtest]: pip install 'xlaserve[loadtest]'\n")
        return 1

    try:
        from xlaserve_loadtest.cli import main as run  # noqa: PLC0415 - it imports them

        return run()
    except KeyboardInterrupt:  # while it imports, or in a report; a run ends by itself and is reported
        return 130


if __name__ == "__main__":
    sys.exit(main())
