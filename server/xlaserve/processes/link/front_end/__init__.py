"""A front's end of a link: the models that another process runs.

`engine_link` is the link, `remote_model` a model at its other end, and `engine_calls` all that is under way there.
"""
