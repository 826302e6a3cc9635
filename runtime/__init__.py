"""NVFP4 checkpoint in; tokens, measurements and verdicts out."""
