"""What all kernels share: the choice of an implementation, parts of arrays, tile sizes."""
