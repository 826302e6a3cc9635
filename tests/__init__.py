"""Tests; a package so that test modules can share `tests.tiny_models`."""
