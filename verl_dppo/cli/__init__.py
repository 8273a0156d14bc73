"""The `verl-dppo` command."""
