"""Fronts with the calls of other packages, over the public API: docs/migrating.md."""
