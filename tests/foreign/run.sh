#!/bin/sh
# Makes an environment with keras_hub under the folder $1, and runs the adapters' tests in it.
set -e
python -m venv "$1/keras_hub"
"$1/keras_hub/bin/pip" install -q -e . pytest hypothesis keras-hub==0.32.0
KERAS_BACKEND=jax "$1/keras_hub/bin/python" -m pytest -n0 tests/foreign -m "slow or not slow"
