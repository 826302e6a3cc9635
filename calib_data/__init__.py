"""Calibration sets: the bundled passages, and loaders of local files and Hugging Face datasets."""

from fp4pipe.calib_data.calibration_set import CalibrationSet
from fp4pipe.calib_data.load import load_calibration

__all__ = ["CalibrationSet", "load_calibration"]
