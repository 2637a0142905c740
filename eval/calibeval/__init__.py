"""Multiple-choice scoring and calibration metrics."""
