"""The methods, one file per paper."""
