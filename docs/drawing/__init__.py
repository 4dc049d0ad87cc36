"""The pictures of the pages: see `__main__.py`."""
