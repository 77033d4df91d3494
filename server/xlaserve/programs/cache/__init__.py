"""The compile cache: programs that a later start need not trace, compile or time again.

Checked files and their keys; `models.networks.cached` defines their contents.
"""
