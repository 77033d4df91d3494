"""How many servers a load needs: the server's own queue, planner and lanes, run in virtual time on measured costs.

`simulation` runs a load through servers, `search` finds how few are enough. Only what takes time is simulated: batches
(`device`) and the event loop's part of a request. Everything that decides is the code that serves.

`capacity` says how many requests a server of several processes carries.
"""
