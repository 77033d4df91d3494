"""A server's other processes: started, watched, replaced and ended by one that does nothing else.

`supervisor` decides, `process` is one of them as its parent sees it, `child` as it sees itself.
"""
