#!/bin/bash
# run.device on the stand-in for the CUDA runtime: the GPU is taken, and what can be wrong with one is told in one line.
. "$(dirname "$0")/script.sh"
. tests/device_cases.sh
gpu="CPU as a GPU, sm_90, 16.0 GiB"

expect 0 "device  *$gpu, f32$"
expect 0 "device  *$gpu, bf16$" run.device=cuda train.dtype=bf16
expect 0 "device  *$gpu, tf32$" loop.ranks=3 train.dtype=tf32
expect 0 "device  *cpu$" run.device=cpu
expect 2 "train.dtype: bf16 needs a GPU, the device is: cpu$" run.device=cpu train.dtype=bf16
export CUDART_FAIL=cudaSetDevice:1:46
expect 1 "^train: GPU 0, $gpu: in use exclusively by another process; .*CUDA_VISIBLE_DEVICES$" run.device=cuda
expect 1 "CUDA_VISIBLE_DEVICES; run.device=cpu does without$" run.device=auto
export CUDART_FAIL=cudaFree:1:2
expect 1 "^train: GPU 0, $gpu: its memory is full; .*CUDA_VISIBLE_DEVICES$" run.device=cuda
unset CUDART_FAIL
export CUDART_DRIVER=11020
expect 1 "^train: no GPU was found: the NVIDIA driver is too old for this build$" run.device=cuda
expect 0 "device  *no GPU was found: the NVIDIA driver is too old for this build, cpu$"
export CUDART_DRIVER=0
expect 1 "^train: no GPU was found: no NVIDIA driver$" run.device=cuda
unset CUDART_DRIVER
export CUDART_DEVICES=0
expect 0 "device  *no GPU was found: none is visible to this process, cpu$"
finish
