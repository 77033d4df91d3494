"""From the lines of run files to figures with intervals, verdicts and caveats.

Pure: reads no file and shows nothing.
"""
