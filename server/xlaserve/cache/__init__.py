"""The compile cache: what a later start need not trace, compile or time again.

Files and their trust; what is in them is for `model.cached` to know.
"""
