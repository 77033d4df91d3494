"""`python -m xlaserve`: the same as `xlaserve`."""

from xlaserve.cli import main

main()
