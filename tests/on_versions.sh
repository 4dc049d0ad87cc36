#!/usr/bin/env bash
# Runs the fast tests on every pair of Python and JAX that kvjax supports, each in an environment of its own:
#
#     bash tests/on_versions.sh                                      # all pairs
#     PYTHONS=3.13 JAX="0.12.0.1" bash tests/on_versions.sh tests/cache   # some pairs, some tests
#
# JAX=newest takes the newest release, and JAX=nightly what is newest at NIGHTLY=..., an index of packages.
# A Python is taken from pyenv, or from the path as python3.13. Environments and what the tests print are in
# build/versions, or in FOLDER=...
# PyTorch, several gigabytes in each of them, is left out: tests that compare with it are skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${FOLDER:=build/versions}"
folder=$(cd "$FOLDER" && pwd)
failed=0

python_of() {
  for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python "$(command -v "python$1")"; do
    [ -x "$found" ] && echo "$found" && return
  done
}

for version in ${PYTHONS:-3.11 3.12 3.13}; do
  for jax in ${JAX:-0.10.2 0.11.0 0.11.2 0.12.0.1}; do
    # JAX 0.11 and later want Python 3.12.
    [[ $version == 3.11 && $jax != 0.10.* ]] && continue
    name=python$version-jax$jax
    python=$(python_of "$version")
    if [ -z "$python" ]; then
      echo "$name: there is no Python $version"
      failed=1
      continue
    fi
    [ -d "$folder/$name" ] || "$python" -m venv "$folder/$name"
    {
      case $jax in
        newest) wanted=(jax) ;;
        nightly) wanted=(--pre --extra-index-url "${NIGHTLY:?}" jax jaxlib) ;;
        *) wanted=("jax==$jax") ;;
      esac
      "$folder/$name/bin/pip" install -q "${wanted[@]}" -e '.[eval,export,gguf]' build hypothesis optax pytest pytest-xdist &&
        JAX_COMPILATION_CACHE_DIR=$folder/compiled-$jax "$folder/$name/bin/python" -m pytest -q "$@"
    } >"$folder/$name.log" 2>&1 || failed=1
    echo "$name: $(tail -n 1 "$folder/$name.log")"
  done
done
exit $failed
