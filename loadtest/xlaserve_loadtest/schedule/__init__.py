"""What is sent, and when: arrivals, payloads, the plan of a run, the search for the highest rate.

Pure and seeded: no clock, no network.
"""
