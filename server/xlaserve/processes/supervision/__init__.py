"""The processes of a server: started, watched, replaced and ended by a supervisor, which does nothing else.

`supervisor` decides for all roles and `supervised_role` for one; `process` is what both know of a running process.
`child_handle` is a process as its supervisor sees it, `child` the same process as it sees itself.
"""
