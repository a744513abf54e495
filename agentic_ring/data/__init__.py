"""Trajectories, the store that holds them, and the chains that models are trained on."""
