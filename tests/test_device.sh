#!/bin/bash
# run.device and train.dtype where there is no GPU: what runs, what is refused, and in which words.
. "$(dirname "$0")/script.sh"
export CUDA_VISIBLE_DEVICES= CUDART_DEVICES=0 # hides those that there are
. tests/device_cases.sh

expect 0 "device .* cpu$" run.device=auto
expect 0 "device .* cpu$" run.device=cpu
expect 0 "memory .* GB per rank: .*; largest train.batch that fits: [1-9][0-9]*$" run.device=cpu
if "$TRAIN" --plan "$work/t.cfg" run.device=auto | grep -q "no GPU was found: "; then
    expect 0 "device  *no GPU was found: .*[a-z], cpu$" run.device=auto
    expect 1 "^train: no GPU was found: .*[a-z]$" run.device=cuda
else
    expect 0 "device  *cpu$" run.device=auto
    expect 2 "^train: command line: run.device: this program was built without CUDA$" run.device=cuda
fi
expect 0 "device  *cpu$" run.device=cpu
expect 2 "^train: command line: train.dtype: bf16 needs a GPU, the device is: cpu$" run.device=cpu train.dtype=bf16
expect 2 "^train: command line: train.dtype: tf32 needs a GPU, the device is: .*cpu$" train.dtype=tf32
expect 2 "run.deterministic: expected yes: all else needs a GPU, the device is: .*cpu$" run.deterministic=no
expect 0 "device  *replay$" run.device=replay replay.forward_ms=1 replay.backward_ms=2
expect 2 "train.dtype: bf16 needs a GPU, the device is: replay$" run.device=replay replay.forward_ms=1 \
    replay.backward_ms=2 train.dtype=bf16
expect 2 "run.device: expected" run.device=tpu
finish
