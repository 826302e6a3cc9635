"""Benchmarks of kernels, loading and serving, with floors and peers in the same table."""
