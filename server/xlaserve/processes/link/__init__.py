"""The link between fronts and an engine: requests taken in by one process, and run by another.

A front opens a link with `front_end.connect`, and has a `ModelEngine` for each model that the engine publishes. The
engine accepts links with `engine_end.Host`. Pixels and outputs lie in the front's `arena`, which both processes map;
`link_records` on a Unix socket, the `channel`, say what to do with them. Linux only: memfd, and one monotonic clock for
all processes.
"""
