"""PyramidInfer, arXiv 2405.12532: the method and its schedules by layer."""
