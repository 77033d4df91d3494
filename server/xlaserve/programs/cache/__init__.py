"""The compile cache: programs that a later start need not trace, compile or time again.

`compile_cache` has the folders, and `records` the checked files. The keys of a folder are made of the environment
(`environment`) and the model (`models.networks.model_identity`). `models.networks.cached` defines the contents.
"""
