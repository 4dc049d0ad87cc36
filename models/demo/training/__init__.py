"""How the bundled model was made; in the repository, and not in the wheel.

`train.py` makes the model and the held-out text beside it.
"""
