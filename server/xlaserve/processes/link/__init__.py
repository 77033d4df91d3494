"""The link between fronts and an engine: requests are taken in by one process, and run by another.

A front opens a link with `connect` of `front_end.engine_link`, and has a `ModelEngine` for each model that the engine
publishes. The engine takes in links with `Host` of `engine_end.host`. Pixels and outputs lie in the front's `arena`,
which both processes map; `link_records` on a Unix socket, the `channel`, say what to do with them. Linux only: memfd,
and one monotonic clock for all processes.
"""
