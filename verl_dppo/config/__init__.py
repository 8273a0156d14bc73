"""Hydra groups that are added to verl's: `algorithm`, `platform`, `recipe`."""
