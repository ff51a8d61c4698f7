#!/bin/sh
# Makes build/peers, a Python environment with the programs Tycho is compared with. Needs python3 and PyPI.
# Without it the benchmarks run all the same and leave the peer's column empty. The allocator that serves the peer best
# comes from the distribution where that can be installed; torch.compile needs a C++ compiler.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
python3 -m venv "$root/build/peers"
"$root/build/peers/bin/pip" install --quiet torch torchvision numpy setuptools tokenizers pillow
# llama.cpp is compiled for this CPU, which takes a quarter of an hour on two cores.
CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF' "$root/build/peers/bin/pip" install --quiet llama-cpp-python ||
  echo 'not installed: llama-cpp-python (the items of llm/ have no peer)'
"$root/build/peers/bin/pip" install --quiet diffusers transformers || echo 'not installed: diffusers (sd/ has no peer)'
CMAKE_ARGS='-DGGML_NATIVE=ON' "$root/build/peers/bin/pip" install --quiet stable-diffusion-cpp-python ||
  echo 'not installed: stable-diffusion-cpp-python (the items of sd/ in f16 and q8_0 have no peer)'
"$root/build/peers/bin/pip" install --quiet deepspeed ninja || echo 'not installed: deepspeed (host_adam/ has no peer)'
"$root/build/peers/bin/python" -c 'import torch; print("torch", torch.__version__)'

if command -v apt-get >/dev/null 2>&1; then
  sudo=''
  [ "$(id -u)" = 0 ] || sudo='sudo -n'
  for package in libjemalloc2 g++ python3-dev; do
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || :)" != installed ]; then
      $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package" >/dev/null 2>&1 ||
        echo "not installed: $package (the peer may be slower than it could be)"
    fi
  done
fi
