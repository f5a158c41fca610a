"""Split a language model over any processes, and get the same bits.

The package's parts are imported from their own modules; this one imports nothing, so that a
rank or a `--help` starts with only what it needs.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
