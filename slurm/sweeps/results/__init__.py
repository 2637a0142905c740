"""What came out: every run's state, and the tables."""
