"""Every metric, of many samples of the same questions at once. NumPy alone; never a model."""
