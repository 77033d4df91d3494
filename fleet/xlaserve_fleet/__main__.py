"""`python -m xlaserve_fleet`: the same as `xlaserve-fleet`."""

import sys

from xlaserve_fleet.cli import main

sys.exit(main())
