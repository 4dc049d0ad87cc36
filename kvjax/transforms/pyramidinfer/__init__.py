"""PyramidInfer: fewer tokens in every further layer."""
