"""The version, apart from the package so that a build reads it without importing anything."""

__version__ = "0.1.0"
