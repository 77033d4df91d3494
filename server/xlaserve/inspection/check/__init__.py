"""`xlaserve check`: each model in a process of its own, in every mode, compared with eager execution.

Only `probe`, which is that process, builds and runs models; the other modules read its findings.
"""
