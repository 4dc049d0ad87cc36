"""The slots of one attention layer, and how their keys and values are stored. Knows no method."""
