#!/bin/sh
# Print the path of a CPython >= 3.12 that can make a virtual environment.
# $PYTHON wins; else the tested versions first: on PATH, then under pyenv (whose shims may not run).
set -u

needs="ddtree-jax needs CPython 3.12 or newer with its venv and ensurepip modules"

# Run the candidate: print its real path and succeed if it is fit.
fit() {
    "$1" -c '
import sys
if sys.implementation.name != "cpython" or sys.version_info < (3, 12):
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    fit "$PYTHON" && exit 0
    found=$("$PYTHON" -c 'import platform as p; print(p.python_implementation(), p.python_version())' 2>/dev/null)
    echo "PYTHON=$PYTHON is not fit (${found:-it does not run}): $needs." >&2
    exit 1
fi

for name in python3.12 python3.13 python3.14 python3 python; do
    fit "$name" && exit 0
done

versions=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
for pattern in '3.12.*' '3.13.*' '3.14.*' '*'; do
    # Newest first. $pattern is a glob on purpose.
    for folder in $(cd "$versions" 2>/dev/null && ls -d $pattern 2>/dev/null | sort -rV); do
        fit "$versions/$folder/bin/python3" && exit 0
    done
done

echo "No fit Python found on PATH or under pyenv: $needs (name one with PYTHON=/path/to/python3)." >&2
exit 1
