"""Looking inside what was compiled: programs as text, what they cost, and what they took."""
