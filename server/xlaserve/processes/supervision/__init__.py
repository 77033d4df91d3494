"""The processes of a server: started, watched, replaced and ended by one that does nothing else.

`supervisor` decides; `child_handle` is a process as its supervisor sees it, `child` the process itself.
"""
