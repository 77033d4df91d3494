"""Builders of networks, a module for each kind of source.

`catalog` calls them; the facts about a kind that are known before a model is loaded are in `config.sources`.
"""
