"""Benchmarks that anyone can run: `make bench`. Arms are interleaved in one run, and figures are ratios of them."""
