"""What builds the network of each kind of source, a module each.

`catalog` calls them; what is known of a kind before anything is loaded stands in `config.sources`.
"""
