"""Explorers, which choose the actions of a collection: noise, intrinsic rewards, and TD3 on task rewards."""
