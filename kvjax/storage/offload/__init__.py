"""Offload: keys and values in host memory."""
