"""A small typed Python client of xlaserve."""
