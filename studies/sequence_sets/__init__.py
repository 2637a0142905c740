"""Prediction sets for label sequences: see README.md."""
