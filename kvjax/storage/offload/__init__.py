"""Offload: keys and values kept in host memory."""
