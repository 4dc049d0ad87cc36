#!/bin/sh
# Makes an environment for each package under the folder $1, and runs the adapters' tests in it.
# gemma needs Python 3.12: $PYTHON names an interpreter, python3 by default. KVJAX_GEMMA names a GGUF
# file of Gemma 3 270M, without which the tests with real weights are skipped.
set -e
for package in gemma==4.0.1 google-tunix==0.1.7 keras-hub==0.32.0; do
  there="$1/${package%%==*}"
  "${PYTHON:-python3}" -m venv "$there"
  # uv finds versions that fit each other in seconds, where pip tries for many minutes.
  "$there/bin/pip" install -q uv
  "$there/bin/uv" pip install -q --python "$there/bin/python" \
    -e '.[gguf]' pytest pytest-xdist hypothesis "jax<0.11" "$package"
  KERAS_BACKEND=jax "$there/bin/python" -m pytest -n0 tests/foreign -m "slow or not slow"
done
