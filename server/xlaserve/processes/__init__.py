"""Servers, put together from the other packages: started, replaced, drained and stopped.

`front` is all that clients meet, `engine` all that runs models. `one_process` puts both into this process; with
`fronts`, `several_processes` supervises a `front_process` for each front, and an `engine_process`.
"""
