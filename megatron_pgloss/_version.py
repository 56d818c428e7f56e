"""The package's version, in one place: setup.py reads this file without importing it."""

__version__ = "0.1.0"
