"""`xlaserve check`: runs each model in a process of its own, in every mode, and compares it with eager execution.

Only that process, `probe`, builds and runs models; the other modules start it and read its findings.
"""
