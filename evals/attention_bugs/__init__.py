"""Bugs that users of ring attention met in other packages, as cases that any implementation can run."""
