"""How a comparison runs: its prompts, and what is measured in each cell."""
