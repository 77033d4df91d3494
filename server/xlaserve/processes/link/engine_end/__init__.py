"""An engine's end of links: the models that fronts in other processes use.

`host` takes in the links of fronts, `front_link` is one of them, and `hosted_models` what all of them may use.
"""
