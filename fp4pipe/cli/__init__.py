"""The `fp4pipe` command: the only package that imports both `convert` and `runtime`, and only while it needs them."""

from fp4pipe.cli.entry import main

__all__ = ["main"]
