"""Servers on many machines: Ray places, watches and scales them, and carries no image.

Only `cluster` knows Ray, which is an extra. Everything else can be run and tested without it.

- A server: `member` starts it (`process`, `launcher`), keeps its entry in the list, and ends it.
- The list: `addresses`, served over HTTP by `name_service`; `follow` writes it to files, `haproxy` for that proxy.
- How many servers there are: `policy`.
"""
