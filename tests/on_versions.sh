#!/usr/bin/env bash
# Runs the fast tests on every pair of Python and JAX that kvjax supports, each in an environment of its own:
#
#     bash tests/on_versions.sh                                      # all pairs
#     PYTHONS=3.13 JAX="0.12.0.1" bash tests/on_versions.sh tests/cache   # some pairs, some tests
#
# JAX=newest takes the newest release, and JAX=nightly the newest build of NIGHTLY=..., an index of packages, which
# JAX's page of installation names; without it, that pair is skipped.
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

# Puts the newest build of the index NIGHTLY in the place of the release that kvjax has brought: kvjax allows no later
# version, and `--pre` would be valid for every package.
install_nightly() {
  "$1/pip" install -q --pre --upgrade --no-deps --index-url "$NIGHTLY" jax jaxlib &&
    "$1/python" -c '
from importlib.metadata import requires
needs = {need for name in ("jax", "jaxlib") for need in requires(name) if "extra ==" not in need}
print(*sorted(need for need in needs if not need.startswith("jax")), sep="\n")' >"$1/../needs.txt" &&
    "$1/pip" install -q -r "$1/../needs.txt" &&
    "$1/python" -c '
import jax, jaxlib
from packaging.version import Version
for package in jax, jaxlib:
    if not Version(package.__version__).is_prerelease:
        raise SystemExit(f"{package.__name__} {package.__version__} is not a nightly build")'
}

for version in ${PYTHONS:-3.11 3.12 3.13}; do
  for jax in ${JAX:-0.10.2 0.11.0 0.11.2 0.12.0.1}; do
    # JAX 0.11 and later want Python 3.12.
    [[ $version == 3.11 && $jax != 0.10.* ]] && continue
    name=python$version-jax$jax
    [[ $jax == nightly && -z ${NIGHTLY:-} ]] && echo "$name: skipped, NIGHTLY names no index" && continue
    python=$(python_of "$version")
    if [ -z "$python" ]; then
      echo "$name: there is no Python $version"
      failed=1
      continue
    fi
    [ -d "$folder/$name" ] || "$python" -m venv "$folder/$name"
    {
      case $jax in
        newest | nightly) wanted=(jax) ;;
        *) wanted=("jax==$jax") ;;
      esac
      "$folder/$name/bin/pip" install -q "${wanted[@]}" -e '.[eval,export,gguf]' build hypothesis optax pytest pytest-xdist &&
        { [ "$jax" != nightly ] || install_nightly "$folder/$name/bin"; } &&
        "$folder/$name/bin/python" -c 'import jax; print("JAX", jax.__version__)' &&
        JAX_COMPILATION_CACHE_DIR=$folder/compiled-$jax "$folder/$name/bin/python" -m pytest -q "$@"
    } >"$folder/$name.log" 2>&1 || failed=1
    echo "$name: $(sed -n '/^JAX /{s/$/:/p;q}' "$folder/$name.log") $(tail -n 1 "$folder/$name.log")"
  done
done
exit $failed
