"""A comparison as data: its cells, the files that keep them, and the rows that they make."""
