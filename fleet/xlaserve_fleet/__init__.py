"""Servers on many machines: Ray places, watches and scales them, and carries no image.

Only `cluster` knows Ray, which is an extra. Everything else can be run and tested without it.
"""
