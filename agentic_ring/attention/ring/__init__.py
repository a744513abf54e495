"""Ring attention on one device: layouts of the sequence, transport of key blocks, hops, derivative."""
