"""The version. A module of its own, because every room may ask for it and `proxima` refers to the highest of them."""

__version__ = "0.1.0"
