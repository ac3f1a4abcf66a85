"""The common ground of Fencepost's packages: version, wire constants, named SQL, errors and the command line's root."""

__version__ = "0.1.0"

__all__ = ["__version__"]
