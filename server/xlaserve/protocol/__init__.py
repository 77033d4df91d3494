"""What every protocol of clients shares: requests checked, models described, calls and messages bounded; no wire."""
