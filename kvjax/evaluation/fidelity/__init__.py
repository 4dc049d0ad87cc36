"""Measures of fidelity: the attention of each layer, and the likelihood of a text."""
