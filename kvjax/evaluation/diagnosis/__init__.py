"""What methods do to the attention over a given text."""
