"""Transforms made of transforms: chains, and where and when another one works."""
