#!/usr/bin/env bash
# Find or make the environment, install this checkout, hand over to `deepinfer`.
#   ./build.sh run "def fibonacci(n):"   set up, then generate text
#   ./build.sh test [pytest options]     set up, then run the tests
#   ./build.sh [build options]           set up, then `deepinfer build`: compile the cpu kernels
set -euo pipefail
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # idle threads sleep: a busy neighbour costs little
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
key=$({ cat "$here"/{pyproject.toml,setup.py,constraints-cpu.txt}; echo "$here"; } | cksum | tr ' ' -)
# A Python that has all that is needed is used as it is (a GPU machine, perhaps without a network).
complete='
from importlib.metadata import version as v
import sys
def at_least(name, *low): return tuple(int(p) for p in v(name).split("+")[0].split(".")[:2]) >= low
[v(n) for n in ("numpy", "rich", "safetensors", "tokenizers")]
sys.exit(not (sys.version_info >= (3, 11) and at_least("torch", 2, 11) and at_least("typer", 0, 26)))'
python=$here/.venv/bin/python
if [ ! -e "$here/.venv" ] && python3 -c "$complete" 2>/dev/null; then
  python=$(command -v python3)
  export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
elif [ ! -e "$here/.venv/deepinfer-$key" ]; then
  echo "setting up $here/.venv (once)" >&2
  for base in python3 python3.13 python3.12 python3.11 none; do
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
  done
  [ "$base" != none ] || { echo "error: Python 3.11 or newer is needed" >&2; exit 3; }
  "$base" -m venv "$here/.venv"
  # The default torch wheel of Linux is the CUDA one: gigabytes that a machine without a GPU cannot use.
  index=--extra-index-url=https://download.pytorch.org/whl/cpu
  if [ -e /dev/nvidia0 ] || [ -n "${PIP_FIND_LINKS:-}" ]; then index=-q; fi
  install() { "$python" -m pip install -q "$index" "$@" -e "$here[dev]" >&2; }
  install -c "$here/constraints-cpu.txt" || install || { echo "error: set-up failed" >&2; exit 3; }
  rm -f "$here"/.venv/deepinfer-* && touch "$here/.venv/deepinfer-$key"
fi
case "${1:-}" in
  test) shift; cd "$here"; exec "$python" -m pytest "$@" ;;
  python) shift; cd "$here"; exec "$python" "$@" ;;
  "" | -*) exec "$python" -m deepinfer build "$@" ;;
  *) exec "$python" -m deepinfer "$@" ;;
esac
