"""How results are shown: tables, pictures, and a page that holds both."""
