"""Kernels: attention of one block of queries to one block of keys. ``registry`` chooses among them."""
