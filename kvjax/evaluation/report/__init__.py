"""Presentation of results: tables, pictures, and a page that holds both."""
