"""Checks of arguments: of their form (arguments.py) and of the values in tensors (values.py)."""
