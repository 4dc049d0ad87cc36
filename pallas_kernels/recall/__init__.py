"""Which slots a query should see, and their rows."""
