"""Training of the bundled model; in the repository only, not in the wheel.

`train.py` makes the model and the held-out text beside it.
"""
