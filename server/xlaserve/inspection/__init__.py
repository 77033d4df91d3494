"""Inspection: compiled programs as text, their cost and the time they take; nothing here takes part in serving."""
