"""Calibration sets and how they are loaded."""
