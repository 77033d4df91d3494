"""Fronts and an engine: requests taken in by one process, run by another.

A front opens a link with `front.connect`, and has a `ModelEngine` for each model that the engine publishes. The engine
accepts links with `host.Host`. Pixels and outputs lie in the front's `arena`, which both map; `records` on a Unix
socket, the `channel`, say what is to be done with them. Linux only: memfd, and one monotonic clock for all processes.
"""
