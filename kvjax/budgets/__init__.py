"""How many slots a method may keep: numbers, shares, tables over lengths and over layers."""
