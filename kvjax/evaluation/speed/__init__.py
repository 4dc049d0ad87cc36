"""Times and bytes of methods, and the lower bounds that the machine sets."""
