"""Generates text from a language model through compressed KV caches."""
