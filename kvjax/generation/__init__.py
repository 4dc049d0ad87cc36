"""Text from a language model through compressed caches."""
