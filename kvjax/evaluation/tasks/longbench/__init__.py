"""The tasks of LongBench, with its prompts and scores."""
