"""Grouping of similar rows: clusters, covers, matches, and means of merged rows."""
