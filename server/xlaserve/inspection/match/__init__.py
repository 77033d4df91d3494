"""`xlaserve match`: the settings with which a model gives the answers of a notebook.

`choices` lists what is tried, `answers` computes a model's answers with any of it, `search` goes through the product,
and `report` says in words and in YAML what was found.
"""
