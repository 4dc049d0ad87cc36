"""Selection of the slots that a query should see, and fetching of their rows."""
