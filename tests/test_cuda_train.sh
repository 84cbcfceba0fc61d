#!/bin/bash
# ./train on the emulated GPU: losses near the CPU's; gradients that travel by NCCL, from GPU to GPU, give the bits of those
# that travel from host to host; the same bits when the device is late with everything; checkpoints resume exactly.
. "$(dirname "$0")/script.sh"
tiny model.heads=3 model.channels=48 model.context=32 data.val="$work/t_val_*.bin" train.seq_len=31 train.batch=2 \
    train.steps=4 train.val_every=4 train.val_batches=1 optim.warmup=1 run.device=cuda comm.verify_every=1

# train NAME ARGS...: out goes to $work/NAME
train() {
    "$TRAIN" "$work/t.cfg" run.out="$work/$1" "${@:2}" >"$work/$1.txt" 2>&1 || { fail "$1"; tail -3 "$work/$1.txt"; }
}
figures() { grep -o '"loss":[^,]*,\|"grad_norm":[^,]*,\|"val_loss":[^,}]*' "$work/$1/log.jsonl"; }
same() { cmp -s <(figures "$1") <(figures "$2") && cmp -s "$work/$1/model.bin" "$work/$2/model.bin" || fail "$1 and $2 differ"; }
errors() { grep -o '"compress_error":[^,}]*' "$work/$1/log.jsonl"; }
# near A B BOUND [WHAT]: relative
near() {
    paste <(${4:-figures} "$1" | cut -d: -f2 | tr -d ,) <(${4:-figures} "$2" | cut -d: -f2 | tr -d ,) | awk -v bound="$3" '
        { d = $1 - $2; d = d < 0 ? -d : d; if (!(d <= bound * $2)) bad = 1; most = $2 > most ? $2 : most }
        END { exit !(most > 0) || bad }' || fail "$1 is not near $2"
}
said() { grep -q "$2" "$work/$1.txt" || fail "$1 does not say '$2'"; }

train cpu run.device=cpu
train cuda
train bf16 train.dtype=bf16
near cuda cpu 1e-5
near bf16 cpu 5e-3
said bf16 'sm_90'
said bf16 'attention  *cuDNN$'
said cuda 'peak  *[0-9.]* TFLOP/s, measured: f32 products of 192 x 192 x 192$'
said cuda 'MFU [0-9.]* % of [0-9.]* TFLOP/s, measured: f32 products'
train anyhow train.dtype=bf16 run.deterministic=no run.peak_tflops=989
said anyhow 'attention  *cuDNN, not deterministic$'
said anyhow 'peak  *989 TFLOP/s, run.peak_tflops$'
said anyhow 'MFU [0-9.]* % of 989 TFLOP/s, run.peak_tflops$'
same anyhow bf16 # as the stand-in adds in one order

export CUDART_DEVICES=4
four="loop.ranks=4 comm.ranks_per_node=2 comm.split_embedding=no comm.algorithm=hierarchical"
train cpu4 run.device=cpu $four
train cpu3 run.device=cpu $four train.steps=3 comm.split_embedding=yes
train host2 loop.ranks=2 comm.transport=loop
train nccl2 loop.ranks=2
said nccl2 'over nccl'
same host2 nccl2
train host4 $four comm.transport=loop
train nccl4 $four
said nccl4 'over nccl'
near host4 cpu4 1e-5
same host4 nccl4
said nccl4 'not measured'
train links4 $four comm.calibrate=yes comm.compress=int8 comm.warmup_steps=4 comm.error_feedback=no # dense all along
same links4 nccl4
said links4 'inside a node .* us, .* GB/s; between nodes .* us, .* GB/s; add .*, encode .*, decode'
train auto4 loop.ranks=4 comm.ranks_per_node=2
near auto4 cpu4 1e-5

# Adding up, clipping and the update do not depend on who has what.
train split4 loop.ranks=4 comm.ranks_per_node=2 comm.transport=loop comm.algorithm=hierarchical
near split4 cpu4 1e-5
train zero4 $four optim.zero=1
same zero4 nccl4
train zerobf2cpu loop.ranks=2 run.device=cpu
train bf4 $four train.dtype=bf16
train zerobf4 $four optim.zero=1 train.dtype=bf16
same zerobf4 bf4
train zerobfhost4 $four optim.zero=1 train.dtype=bf16 comm.transport=loop
same zerobf4 zerobfhost4
near zerobf4 cpu4 5e-3
train zerobf2 loop.ranks=2 optim.zero=1 train.dtype=bf16 comm.transport=loop # the embedding's rows ahead of it
near zerobf2 zerobf2cpu 5e-3
train zerohost4 $four optim.zero=1 comm.transport=loop
same zerohost4 nccl4

# The tied embedding in two gradients: its rows and their tokens on the GPU, in every way that a step may go.
gzip -nc tests/data/emma.txt | head -c 60000 >"$work/dense.txt" # nearly all of the vocabulary in every step
"$BUILD/prepare" --tokenizer bytes --out "$work" dense "$work/dense.txt" >/dev/null || fail prepare
two="loop.ranks=4 comm.ranks_per_node=2 comm.algorithm=hierarchical train.steps=3"
# both NAME ARGS...: by NCCL, also when the device is late, and by host: the same
both() {
    train $1-nccl $two "${@:2}"
    said $1-nccl 'over nccl'
    said $1-nccl 'embedding in two'
    train $1-host $two "${@:2}" comm.transport=loop
    same $1-nccl $1-host
    CUDART_LATE=1 EMULATOR_SEED=3 train $1-late $two "${@:2}"
    same $1-nccl $1-late
}
both split
both split-zero optim.zero=1
both split-bf16 optim.zero=1 train.dtype=bf16
both split-micro train.global_batch=496
both split-zero-micro optim.zero=1 train.global_batch=496 comm.compress=int8 comm.warmup_steps=1
both split-dense data.train="$work/dense_train_*.bin" train.val_every=0
both split-dense-zero data.train="$work/dense_train_*.bin" train.val_every=0 optim.zero=1
same split-nccl split-zero-nccl
same split-dense-nccl split-dense-zero-nccl
near split-nccl cpu3 1e-5
for compressor in bf16 int8 int4 topk; do
    # Buckets of one segment each, so that a rank encodes the same parts of the sums on host and GPU: the error is its own.
    lossy="comm.compress=$compressor comm.warmup_steps=1 comm.topk_density=0.1 comm.bucket_bytes=100000"
    for scope in between all; do
        train $compressor-$scope $four $lossy comm.compress_scope=$scope
        said $compressor-$scope 'over nccl'
        train $compressor-host-$scope $four $lossy comm.compress_scope=$scope comm.transport=loop
        same $compressor-$scope $compressor-host-$scope
        near $compressor-$scope $compressor-host-$scope 1e-6 errors
    done
    near $compressor-between nccl4 0.3 # no NaN, nothing lost; top-k of 4 steps is far off
    cmp -s $work/$compressor-between/model.bin $work/nccl4/model.bin && fail "$compressor changes nothing"
done
CUDART_LATE=1 train int8-late $four comm.compress=int8 comm.warmup_steps=1 comm.bucket_bytes=100000
same int8-late int8-between
train tensor $four comm.compress=int8_tensor comm.warmup_steps=1
said tensor 'over loop'

CUDART_LATE=1 train late4 $four
same late4 nccl4
CUDART_LATE=1 train latehost4 $four comm.transport=loop
same latehost4 nccl4
CUDART_LATE=1 EMULATOR_SEED=5 train late1
same late1 cuda

# Times are the device's: in the trace of a late one, layers of backward follow each other within backward, forward ends
# where that begins, buckets begin when they are ready, and phases lie within their bucket;
# but for what the clocks of host and device disagree where threads wait for a core.
CUDART_LATE=1 train traced $four log.trace="$work/traced.json" log.profile="$work/traced.profile"
same traced nccl4
sed -n 's/.*"ph":"[Xi]","name":"\([^"]*\)","pid":\([0-9]*\),"tid":\([0-9]*\),"ts":\([-0-9.]*\)\(,"dur":\([0-9.]*\)\)*.*/\2|\3|\1|\4|\6/p' "$work/traced.json" |
awk -F '|' -v slack=50000 '
    function bad(what) { print "FAIL: trace, rank " $1 ", " $3 ": " what; failed = 1 }
    { start = $4; end = $4 + $5; seen[$3]++ }
    $3 ~ /^forward/ { forward[$1] = end; if (!($5 > 0)) bad("takes no time") }
    $3 ~ /^backward [0-9]/ { back[$1] = start; back_end[$1] = end; if (start < forward[$1] - slack) bad("begins within forward") }
    $3 ~ /^backward (head|layer|embedding)/ { if (start < back[$1] - slack || end > back_end[$1] + slack) bad("outside of backward"); layers++ }
    $3 ~ /^ready: bucket/ { ready[$1] = start }
    $3 ~ /^bucket/ { from[$1] = start; to[$1] = end; if (start < ready[$1] - slack) bad("leaves before it is ready") }
    $2 >= 2 { if (start < from[$1] - slack || end > to[$1] + slack) bad("outside of its bucket"); phases++ }
    END { if (!(layers >= 4 * 4 * 3) || !(phases >= 4 * 4 * 3)) { print "FAIL: trace: " layers " layers, " phases " phases"; failed = 1 } exit failed }' ||
    failures=$((failures + 1))
grep -q ' linear_backward ' "$work/traced.profile" && awk '$2 == "linear_forward" && !($7 > 0) { exit 1 }' "$work/traced.profile" || fail "the profile has no times"

# resumed NAME ARGS...: steps 1 and 2, then 3 and 4, are one run of 4: parameters, losses, residuals of error feedback
resumed() {
    local args="${*:2} optim.schedule=constant train.val_every=2"
    train "$1" $args
    train "$1-half" $args train.steps=2 train.save_every=2
    train "$1-half" $args train.save_every=2 run.resume=yes
    same "$1" "$1-half"
}
resumed whole1 train.dtype=bf16
for dtype in f32 bf16; do
    for zero in 0 1; do
        resumed "whole-$dtype-$zero" $four comm.compress=int8 comm.warmup_steps=0 train.dtype=$dtype optim.zero=$zero
    done
done
resumed whole-host $four comm.compress=int8 comm.warmup_steps=0 train.dtype=bf16 comm.transport=loop
same whole-host whole-bf16-0
resumed whole-host-zero loop.ranks=3 train.dtype=bf16 optim.zero=1 comm.transport=loop

# A GPU for two ranks: NCCL is impossible.
CUDART_DEVICES=1 train shared2 loop.ranks=2
said shared2 'over loop'
said shared2 'copied to the host and back: NCCL needs a GPU for each rank'
CUDART_DEVICES=1 "$TRAIN" "$work/t.cfg" run.out="$work/refused" loop.ranks=2 comm.transport=nccl >"$work/refused.txt" 2>&1
[ $? = 1 ] || fail "comm.transport=nccl with one GPU for two ranks: expected exit 1"
said refused 'comm.transport = nccl: NCCL needs a GPU for each rank'
# Ranks that call themselves hosts (bench/own_host) may share one as far as we are concerned; NCCL, here a stand-in, decides.
NCCL_HOSTID=each CUDART_DEVICES=1 "$TRAIN" "$work/t.cfg" run.out="$work/hosts" loop.ranks=2 comm.transport=nccl >"$work/hosts.txt" 2>&1
said hosts 'NCCL, start: '

CUDART_MEMORY_MIB=200 "$TRAIN" "$work/t.cfg" run.out="$work/small" >"$work/small.txt" 2>&1
[ $? = 2 ] || fail 'too little memory: expected exit 2'
said small "of its GPU's memory, .* are free for it; train.batch=1 does not fit either"
"$TRAIN" "$work/t.cfg" run.out="$work/cpu2" run.device=cpu loop.ranks=2 comm.transport=nccl >"$work/cpu2.txt" 2>&1
[ $? = 1 ] || fail 'comm.transport=nccl on the cpu: expected exit 1'
said cpu2 'does not run on a GPU'

[ $failures = 0 ] && echo "all passed"
exit $((failures > 0))
