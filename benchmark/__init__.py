"""Benchmarks, one module each; its docstring's first line says what it measures."""
