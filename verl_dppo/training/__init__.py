"""Everything that touches verl: the hook points of its trainers, losses and configuration.

verl's v1 trainers load `trainer` as soon as they are imported, so no other module here may import them while it is
itself being imported.
"""
