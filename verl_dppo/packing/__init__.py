"""Packing and balancing of what was kept. numpy only. Nothing is here yet: verl's own balancer orders the rows."""
