"""Where a server is put together, warmed, served with, drained and stopped.

`front` has all that clients meet, `engine` all that runs models. In `one_process` both are in this process; with
`fronts`, `several_processes` supervises a `front_process` for each of them and an `engine_process`.
"""
