"""Trajectories, the store they live in, and the chains a model is trained on."""
