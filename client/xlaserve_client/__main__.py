"""`python -m xlaserve_client`: the same as `xlaserve-client`."""

import sys

from xlaserve_client.cli import main

sys.exit(main())
