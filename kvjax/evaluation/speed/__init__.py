"""Times and bytes of methods, beside the floors of the machine."""
