#!/usr/bin/env bash
# Trains the bundled tiny Wan2.1 from nothing: VAE, then transformer and text encoder, then the figures.
# About an hour on 2 cores. Seeds are fixed. Needs a C++ compiler (torch.compile).
#
#     bash scripts/pretrain/run.sh [output folder, default cards/wan21/weights/tiny]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-cards/wan21/weights/tiny}
work=build/pretrain
mkdir -p "$work"

# glibc returns the large buffers of every step to the system by default and takes them again: half of the time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=500000000
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONPATH=.

python scripts/pretrain/train_vae.py --out "$work/vae"
python scripts/pretrain/train_base.py --vae "$work/vae" --out "$out" --record "$work/base.json" \
    --steps 9000 --pairs .55 --noise .1 --compile
python scripts/pretrain/figures.py --folder "$out" --training "$work/vae/vae.json" "$work/base.json"
