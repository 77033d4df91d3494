"""Planning: the number of servers that a load needs, found by running the server's own queue in virtual time.

`simulation` runs a load through servers, `search` finds how few are enough. Only durations are simulated: of
batches (`virtual_device`) and of the event loop's part of a request. All decisions are made by the code that serves.
"""
