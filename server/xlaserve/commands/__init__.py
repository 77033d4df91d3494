"""The commands, a module each, and what several of them share.

They parse, call and print; what they show is computed elsewhere.
"""
