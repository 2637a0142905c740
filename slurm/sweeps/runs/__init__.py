"""What a sweep is: its files, its grid of runs, a run's folder and state, what it is asked."""
