"""stoker: keeps accelerators fed from CPU hosts."""

__version__ = "0.1.0"
