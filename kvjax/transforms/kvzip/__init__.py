"""KVzip: what a text would look up of itself, and the fit of what stays."""
