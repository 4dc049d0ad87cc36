"""A comparison as data: its cells, the files that keep them, and the rows of its results."""
