"""The compile cache: what a later start need not trace, compile or time again.

Checked files and their keys; `models.networks.cached` knows what is in them.
"""
