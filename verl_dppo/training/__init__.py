"""Everything that touches verl: the hook points of its trainers, losses and configuration."""
