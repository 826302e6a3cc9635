"""Recipes shipped with the package, one YAML file each."""
