"""From the lines of run files to figures with intervals, verdicts (`verdict`), sentences (`conclusion`) and caveats.

Pure: reads no file and shows nothing.
"""
