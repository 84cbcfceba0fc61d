#!/bin/bash
# A rank is killed in the middle of a bucket, under every algorithm: all others end within 10 s, non-zero, and one line of
# ours names it. When the launcher ends them all nobody is named.
# TRIALS=20 ALGORITHMS="ring tree" tests/test_kill.sh: more of some. Called by `make test`.
set -u
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build} TRAIN=${TRAIN:-./train} MPI=${MPI:-1} TRIALS=${TRIALS:-1}
if [ "$MPI" = 0 ]; then
    echo "test_kill.sh: skipped: built without MPI"
    exit 0
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# 6 M parameters in some 50 buckets, and hardly anything but communication
"$BUILD/prepare" --tokenizer bytes --out "$work" --val 0 t tests/data/emma.txt >/dev/null || exit 1
cat >"$work/t.cfg" <<CFG
[model]
layers = 8
heads = 4
channels = 256
context = 32
vocab = 257
[data]
train = $work/t_train_*.bin
tokenizer = bytes
[train]
seq_len = 32
batch = 1
steps = 1000000
val_every = 0
sample_every = 0
save_every = 0
[run]
device = replay
out = $work/out
threads = 1
[replay]
forward_ms = 1
backward_ms = 1
[comm]
calibrate = no
ranks_per_node = 2
bucket_bytes = 512K
CFG

fail() {
    echo "test_kill.sh: $1"
    sed 's/^/    /' "$work/log"
    failures=$((failures + 1))
}

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# Those of the launcher's children that are ranks, as "rank process" lines
ranks_of() {
    local process rank
    for process in $(ps -o pid= --ppid "$1"); do
        rank=$(tr '\0' '\n' <"/proc/$process/environ" 2>/dev/null | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
        [ -z "$rank" ] || echo "$rank $process"
    done
}

steps_under_way() { [ "$(cat "$work/out/log.jsonl" 2>/dev/null | wc -l)" -ge 2 ]; }
alive() { grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null; } # not a zombie

# start NAME ARGS...: four ranks, returns somewhere in a later step; sets launcher and processes
start() {
    local name=$1 tries=0
    shift
    rm -rf "$work/out"
    mpirun --oversubscribe -n 4 "$TRAIN" "$work/t.cfg" "$@" >"$work/log" 2>&1 &
    launcher=$!
    while ! steps_under_way && kill -0 $launcher 2>/dev/null && [ $tries -lt 400 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
    sleep 0.$((RANDOM % 400 + 100))
    processes=$(ranks_of $launcher)
    [ "$(wc -l <<<"$processes")" = 4 ] || { fail "$name: expected four ranks"; kill $launcher; exit 1; }
}

process_of() { sed -n "s/^$1 //p" <<<"$processes"; }

# kill_one NAME RANK ARGS...: leaves what it took in took_ms
kill_one() {
    local name=$1 victim=$2 process line start_ms
    shift 2
    start "$name" "$@"
    line="train: rank $victim (process $(process_of "$victim") on [^ ]*) ended unexpectedly; the run stops"
    start_ms=$(now_ms)
    kill -9 "$(process_of "$victim")"
    for process in $(cut -d' ' -f2 <<<"$processes"); do
        while alive "$process" && [ $(($(now_ms) - start_ms)) -lt 10000 ]; do sleep 0.02; done
        alive "$process" && fail "$name: a rank lives 10 s after rank $victim was killed" && kill -9 "$process"
    done
    took_ms=$(($(now_ms) - start_ms))
    wait $launcher && fail "$name: exit code 0"
    [ "$(grep -c '^train: ' "$work/log")" = 1 ] && grep -qx "$line" "$work/log" || fail "$name: expected the line '$line'"
}

for algorithm in ${ALGORITHMS:-naive native iallreduce ring tree reduce_scatter hierarchical leader}; do
    arguments="comm.algorithm=$algorithm"
    [ $algorithm = leader ] && arguments='comm.algorithm=hierarchical comm.leader=yes'
    worst_ms=0
    for ((trial = 0; trial < TRIALS; trial++)); do
        took_ms=0
        # shellcheck disable=SC2086
        kill_one $algorithm $((RANDOM % 4)) $arguments
        [ $took_ms -gt $worst_ms ] && worst_ms=$took_ms
    done
    echo "$algorithm: $TRIALS killed, the others ended within $worst_ms ms"
done

start 'end by mpirun' comm.algorithm=ring
kill $launcher
wait $launcher && fail 'end by mpirun: exit code 0'
grep '^train: ' "$work/log" && fail 'end by mpirun: no rank is to blame'

[ $failures = 0 ] && echo "test_kill.sh: passed"
exit $((failures > 0))
