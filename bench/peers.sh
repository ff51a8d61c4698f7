#!/bin/sh
# Makes build/peers, a Python environment with the programs Tycho is compared with. Needs python3 and PyPI.
# Without it the benchmarks run all the same and leave the peer's column empty.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
python3 -m venv "$root/build/peers"
"$root/build/peers/bin/pip" install --quiet torch numpy
"$root/build/peers/bin/python" -c 'import torch; print("torch", torch.__version__)'
