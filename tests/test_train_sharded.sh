#!/bin/bash
# ./train with optim.zero and comm.compress on a tiny model and real text: the same bits with and without shards, memory
# and bytes by their formulas, exact resume, one clear line for what does not go together.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
BUILD=${BUILD:-build} TRAIN=${TRAIN:-./train} MPI=${MPI:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

"$BUILD/prepare" --tokenizer bytes --out "$work" --val 0.1 t tests/data/emma.txt >/dev/null || { fail prepare; exit 1; }
cat >"$work/t.cfg" <<CFG
[model]
layers = 2
heads = 2
channels = 66
context = 41
vocab = 257
[data]
train = $work/t_train_*.bin
val = $work/t_val_*.bin
tokenizer = bytes
[train]
seq_len = 31
batch = 2
steps = 12
[optim]
lr = 3e-3
warmup = 5
[run]
threads = 1
[comm]
verify_every = 1
calibrate = no
bucket_bytes = 64K
CFG

# train NAME RANKS HOW ARGS...: HOW is loop or mpi; out goes to $work/NAME
train() {
    local name=$1 ranks=$2 how=$3
    shift 3
    if [ "$how" = mpi ] && [ $MPI = 1 ]; then
        mpirun --oversubscribe -n "$ranks" "$TRAIN" "$work/t.cfg" run.out="$work/$name" "$@" >"$work/$name.log" 2>&1
    else
        "$TRAIN" "$work/t.cfg" run.out="$work/$name" loop.ranks="$ranks" "$@" >"$work/$name.log" 2>&1
    fi || { fail "$name: exit $?"; tail -5 "$work/$name.log"; }
}
values() { grep -o "\"$2\":[^,}]*" "$work/$1/log.jsonl" | cut -d: -f2; }
same_model() { cmp "$work/$1/model.bin" "$work/$2/model.bin" || fail "$1 and $2 differ"; }

echo "- ZeRO-1 on and off, 1 to 5 ranks, odd sizes, T below the context: the same parameters, the same bytes"
for ranks in 1 2 3 4 5; do
    for algorithm in reduce_scatter hierarchical; do
        how=loop
        [ $ranks = 3 ] && how=mpi
        name=$algorithm.$ranks
        train $name.off $ranks $how comm.algorithm=$algorithm comm.verify_every=0 comm.split_embedding=no
        train $name.on $ranks $how comm.algorithm=$algorithm optim.zero=1 comm.verify_every=0 \
            comm.split_embedding=no
        same_model $name.on $name.off
        [ "$(values $name.on grad_norm)" = "$(values $name.off grad_norm)" ] || fail "$name: the norms differ"
        # the first step has nothing to gather yet
        [ "$(values $name.on bytes_intra | tail -n +2)" = "$(values $name.off bytes_intra | tail -n +2)" ] ||
            fail "$name: bytes differ"
    done
done
train 2x2.off 4 loop comm.ranks_per_node=2
train 2x2.on 4 mpi comm.ranks_per_node=2 optim.zero=1 train.save_every=6 train.val_every=6
same_model 2x2.on 2x2.off
moments() { sed -n 's/.*moments \([0-9.]*\),.*/\1/p' "$work/$1.log"; }
train big.off 4 loop model.channels=512 model.layers=4 train.steps=1 comm.algorithm=reduce_scatter
train big.on 4 loop model.channels=512 model.layers=4 train.steps=1 optim.zero=1
[ "$(moments big.off)" = 0.10 ] && [ "$(moments big.on)" = 0.03 ] || fail "moments $(moments big.off), $(moments big.on)"

echo "- the embedding in one or two gradients: the same losses"
train joined 4 loop comm.ranks_per_node=2 comm.split_embedding=no train.global_batch=744
train split 4 loop comm.ranks_per_node=2 train.global_batch=744
paste <(values joined loss) <(values split loss) |
    awk '{ d = $1 - $2; if (NF != 2 || !(d * d <= 1e-10 * $1 * $1)) exit 1 }' || fail "split_embedding changes the loss"

echo "- compressed: the same bits with other buckets, overlap, processes; resume is exact, shards or not"
for compress in "bf16" "int8" "int4" "topk comm.topk_density=0.1" "int8 comm.compress_scope=all" "int8 optim.zero=1"; do
    set -- comm.compress=$compress comm.ranks_per_node=2 comm.warmup_steps=2 train.save_every=6 train.keep=3
    name=${compress//[ =]/-}
    train $name 4 loop "$@"
    train $name.other 4 mpi "$@" comm.bucket_bytes=1G comm.overlap=no
    same_model $name.other $name
    values $name compress_error | awk 'NR == 1 && $1 > 0 { print "FAIL: warm-up is compressed"; bad = 1 }
        NR == 12 && !($1 > 0 && $1 < 1) { print "FAIL: compress_error " $1; bad = 1 } END { exit bad }' || fail "$name"
    cp -r "$work/$name" "$work/$name.resumed"
    rm "$work/$name.resumed"/*_00000012.bin
    train $name.resumed 4 loop "$@" run.resume=yes
    same_model $name.resumed $name
    grep -q "start at zero" "$work/$name.resumed.log" && fail "$name: residuals were lost"
done
rm "$work/int8"/*_00000012.bin
train int8 6 loop comm.compress=int8 comm.ranks_per_node=3 run.resume=yes
grep -q "has no residuals of error feedback" "$work/int8.log" || fail "nothing says that residuals were dropped"

echo "- bytes between nodes: 2 S in all, and the wire's share of them"
bytes() { values $1 bytes_inter | tail -1; }
train f32 8 loop comm.ranks_per_node=4 model.channels=256 train.steps=3
train int8.bytes 8 loop comm.ranks_per_node=4 model.channels=256 train.steps=3 comm.compress=int8 comm.warmup_steps=0
train topk.bytes 8 loop comm.ranks_per_node=4 model.channels=256 train.steps=3 comm.compress=topk comm.warmup_steps=0
awk -v f=$(bytes f32) -v i=$(bytes int8.bytes) -v t=$(bytes topk.bytes) 'BEGIN {
    if (!(i / f > 0.25 && i / f < 0.262)) { print "FAIL: int8 sends " i / f " of f32"; exit 1 }
    if (!(t / f < 0.03)) { print "FAIL: topk sends " t / f " of f32"; exit 1 } }' || failures=$((failures + 1))

echo "- what does not go together"
refuse() { # TEXT ARGS...: exit 2 with that text, nothing written
    local text=$1
    shift
    "$TRAIN" "$work/t.cfg" run.out="$work/refused" loop.ranks=2 "$@" >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && grep -qF -- "$text" "$work/stderr" || { fail "expected '$text'"; cat "$work/stderr"; }
    [ "$(wc -l <"$work/stderr")" = 1 ] || fail "more than one line: $(cat "$work/stderr")"
}
refuse "comm.compress = int8: needs comm.algorithm = reduce_scatter or hierarchical" comm.compress=int8 comm.algorithm=tree
refuse "comm.requantise = ring" comm.compress=int8 comm.algorithm=ring
refuse "optim.zero = 1: needs comm.algorithm" optim.zero=1 comm.algorithm=ring
refuse "comm.topk_density: expected" comm.compress=topk comm.topk_density=0.9

[ $failures = 0 ] || { echo "$failures failure(s)"; exit 1; }
