"""How the bundled model was made and measured; in the repository, and not in the wheel.

`train.py` makes the model, `measure.py` measures it, `held_out.py` writes the text beside it.
"""
