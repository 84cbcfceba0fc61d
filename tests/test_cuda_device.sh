#!/bin/bash
# run.device on the stand-ins for the CUDA runtime and NCCL: the GPU is taken; what can go wrong with one, before a run and
# in the middle of it, is told in one line by the rank that has the cause, ends all ranks, and leaves no model.
# comm.group=pcie.
. "$(dirname "$0")/script.sh"
. tests/device_cases.sh
gpu="CPU as a GPU, sm_90, 16.0 GiB"
driver="\(this build needs a driver for CUDA 1[0-9]\)" cpu="run.device=cpu does without"

expect 0 "device  *$gpu, f32$"
expect 0 "device  *$gpu, bf16$" run.device=cuda train.dtype=bf16
expect 0 "device  *$gpu, tf32$" loop.ranks=3 train.dtype=tf32
expect 0 "device  *cpu$" run.device=cpu
expect 2 "train.dtype: bf16 needs a GPU, the device is: cpu$" run.device=cpu train.dtype=bf16
export CUDART_FAIL=cudaSetDevice:1:46
expect 1 "^train: GPU 0, $gpu: in use exclusively by another process; .*CUDA_VISIBLE_DEVICES; run.device=cpu does without$" run.device=cuda
expect 1 "CUDA_VISIBLE_DEVICES; run.device=cpu does without$" run.device=auto
export CUDART_FAIL=cudaFree:1:2
expect 1 "^train: GPU 0, $gpu: its memory is full; .*CUDA_VISIBLE_DEVICES; run.device=cpu does without$" run.device=cuda
unset CUDART_FAIL
export CUDART_ARCH=75
expect 1 "^train: GPU 0, CPU as a GPU, sm_75, 16.0 GiB: this program needs sm_80 \(Ampere\) or newer; name another GPU in CUDA_VISIBLE_DEVICES; $cpu$" run.device=cuda
unset CUDART_ARCH
export CUDART_MEMORY_MIB=64
expect 2 "^train: each rank needs .* of its GPU's memory, .* are free for it; train.batch=1 does not fit either; lower train.seq_len" run.device=cuda
unset CUDART_MEMORY_MIB
export CUDART_DRIVER=11020
expect 1 "^train: no GPU was found: the NVIDIA driver is too old for this build; update it $driver; $cpu$" run.device=cuda
expect 0 "device  *no GPU was found: the NVIDIA driver is too old for this build, cpu$"
export CUDART_DRIVER=0
expect 1 "^train: no GPU was found: no NVIDIA driver; install one $driver; $cpu$" run.device=cuda
unset CUDART_DRIVER
export CUDART_DEVICES=0
expect 0 "device  *no GPU was found: none is visible to this process, cpu$"
expect 1 "^train: no GPU was found: none is visible to this process; see what CUDA_VISIBLE_DEVICES and nvidia-smi say $driver; $cpu$" run.device=cuda

# ---- several ranks ----

export CUDART_DEVICES=4
four="run.device=cuda loop.ranks=4"
expect 0 "4 on 2 nodes over nccl" $four comm.ranks_per_node=2 # a GPU each, whatever counts as a node
export CUDART_FAIL=cudaFree@2:1:2
expect 1 "^train: rank 2: GPU 2, $gpu: its memory is full; " $four
unset CUDART_FAIL

# NCCL does not start: on rank 0, on another one, never.
export NCCL_FAIL=ncclGetUniqueId:0:1:2
expect 1 "^train: rank 0: NCCL, start: .*the last words of NCCL; NCCL_DEBUG=WARN tells more$" $four
export NCCL_FAIL=ncclCommInitRankConfig:2:1:2
expect 1 "^train: rank 2: NCCL, start: .*the last words of NCCL; NCCL_DEBUG=WARN tells more$" $four
export NCCL_FAIL=ncclCommInitRankConfig:2:1:7
expect 1 "^train: rank [0-3]: NCCL, start: no answer from the other GPUs for 1 s \(comm.timeout_s\): the last words" $four comm.timeout_s=1
unset NCCL_FAIL
if [ $MPI = 1 ]; then # the stand-in's ranks are threads: processes do not find each other
    output=$(timeout 60 mpirun --oversubscribe -n 3 "$TRAIN" --plan "$work/t.cfg" run.out="$work/out" run.device=cuda 2>&1)
    [ $? = 1 ] && [ "$(grep -c '^train: rank 1: NCCL, start: ' <<<"$output")" = 1 ] &&
        [ "$(grep -c '^train:' <<<"$output")" = 1 ] ||
        fail "processes that NCCL does not connect: $output"
fi

# stopped REGEX ARGS...: ./train ARGS ends with exit 1 and one line, which matches, and leaves no model
stopped() {
    local regex=$1 found
    rm -rf "$work/out"
    timeout 60 "$TRAIN" "$work/t.cfg" run.out="$work/out" "${@:2}" train.steps=6 run.threads=1 >"$work/log" 2>"$work/errors"
    found=$?
    sed -i '/^warning: /d' "$work/errors" # of how many threads share a core
    [ $found = 1 ] || fail "${*:2}: expected exit 1, found $found: $(cat "$work/errors")"
    [ "$(wc -l <"$work/errors")" = 1 ] && grep -qE "$regex" "$work/errors" || fail "${*:2}: expected '$regex', found: $(cat "$work/errors")"
    [ ! -e "$work/out/model.bin" ] || fail "${*:2}: wrote a model"
}
last='the last words of NCCL; NCCL_DEBUG=WARN tells more; node 0, bucket [0-9] of step [1-6]$'
NCCL_FAIL=ncclGroupEnd:1:3:2 stopped "^train: rank 1: NCCL, all-reduce: unhandled error: $last" $four
NCCL_FAIL=ncclGroupEnd:3:4:2 stopped "^train: rank 3: NCCL, messages between GPUs: unhandled error: $last" $four comm.algorithm=ring
slow="no answer from the other GPUs for 2 s \(comm.timeout_s\): the last words of NCCL"
NCCL_FAIL=ncclGroupEnd:1:3:7 stopped "^train: rank [0-3]: NCCL, all-reduce: $slow" $four comm.timeout_s=2
CUDART_LATE=1 NCCL_FAIL=kernel:1:3:7 stopped "^train: rank [0-3]: NCCL, [a-zA-Z -]*: $slow.*; node 0, .*step [1-6]$" $four comm.timeout_s=2
CUDART_LATE=1 NCCL_FAIL=kernel:1:4:7 stopped "^train: rank [0-3]: NCCL, [a-zA-Z -]*: $slow" $four comm.timeout_s=2 optim.zero=1

# A GPU fails, at once or while streams are late: in a kernel, in a copy of gradients to the host, in waiting for them, in
# zeroing new memory.
export ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0 # a GPU that has failed gives nothing back
for late in 0 1; do
    export CUDART_LATE=$late
    for transport in loop nccl; do
        CUDART_FAIL=cudaLaunchKernel@1:60:700 stopped "^train: rank 1: .*illegal memory access" $four comm.transport=$transport
        for call in 7 40; do
            CUDART_FAIL=cudaStreamSynchronize@1:$call:700 stopped "^train: rank 1: .*illegal memory access" $four comm.transport=$transport
        done
    done
    CUDART_FAIL=cudaLaunchHostFunc@2:3:2 stopped "^train: rank 2: GPU 2, $gpu: cudaLaunchHostFunc" $four comm.transport=loop
done
for call in 26 28; do # of the two streams, one that does not stick: what was asked for goes on behind it
    CUDART_FAIL=cudaStreamSynchronize@1:$call:2 stopped "^train: rank 1: GPU 1, $gpu: .*: out of memory$" $four comm.transport=loop
done
unset CUDART_LATE
for call in 1 2 4 7; do # memory that is there when the run is planned and gone when it begins
    CUDART_FAIL=cudaMalloc@1:$call:2 stopped "^train: rank 1: .*memory" $four
done
NCCL_FAIL=ncclCommFinalize:2:1:7 "$TRAIN" "$work/t.cfg" run.out="$work/out" $four train.steps=1 >"$work/log" 2>&1 ||
    fail "NCCL that does not end: $(cat "$work/log")"

# ---- comm.group = pcie ----

rm -rf "$work/out"
export HWLOC_XMLFILE=tests/data/two_pcie_switches.xml
expect 0 "4 on 2 PCIe groups over nccl" $four comm.group=pcie
expect 0 "3 on 2 PCIe groups over nccl" $four comm.group=pcie loop.ranks=3 # one has its switch for itself
expect 0 "4 on 3 PCIe groups over nccl" $four comm.group=pcie comm.ranks_per_node=3 # a switch of two nodes
expect 0 "4 on 1 node over nccl" $four
"$TRAIN" "$work/t.cfg" run.out="$work/out" $four comm.group=pcie comm.compress=int8 train.steps=1 >"$work/log" 2>&1
grep -q 'sync .*hierarchical' "$work/log" || fail "PCIe groups, a step: $(cat "$work/log")"
rm -rf "$work/out"
expect 2 "^train: comm.group = pcie: the model does not run on a GPU$" comm.group=pcie run.device=cpu loop.ranks=2
CUDART_DEVICES=5 expect 2 "^train: rank 4: comm.group = pcie: hwloc does not see the GPU at 0000:14:00.0; " $four comm.group=pcie loop.ranks=5
finish
