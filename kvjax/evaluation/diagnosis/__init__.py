"""What methods do to the attention over a given text, and what is alike in its cache."""
