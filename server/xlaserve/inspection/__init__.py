"""Inspection of compiled programs: their text, cost, memory and time. No module here takes part in serving."""
