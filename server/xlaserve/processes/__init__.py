"""Servers, put together from the other packages: started, replaced, drained and stopped.

`front` has all that clients connect to, `engine` all that runs models. There are two shapes of server:

- One process (`one_process`): a front and an engine on one event loop. Its parent (`beginning`, `supervision.parent`)
  starts it again after a crash.
- Several processes (`several_processes`): a supervisor, a process for each front (`fronts`, `front_process`), and one
  for each engine (`engines`, `engine_process`). Fronts are linked to engines by `link`, and show the models of all
  engines as those of one (`remote_engines`). An engine is replaced by another one (`engine_replacement`), a whole
  server by another server (`upgrades`, `handover`).
"""
