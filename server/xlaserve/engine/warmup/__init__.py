"""Before a program serves: it is compiled, checked against a reference, timed, and written to the ledger.

Also beside traffic, for models that are loaded again and sizes that nobody configured.
"""
