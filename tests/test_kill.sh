#!/bin/bash
# Trap: peers hang when one dies (horovod#3494). A rank is killed in the middle of a bucket, under every algorithm: all
# others end within 10 s, non-zero, and one line of ours names it. When the launcher ends them all nobody is named.
# TRIALS=20 ALGORITHMS="ring tree" tests/test_kill.sh: more of some. Called by `make test`.
. "$(dirname "$0")/script.sh"
needs_mpi
TRIALS=${TRIALS:-1}

# 6 M parameters in some 50 buckets, and hardly anything but communication
tiny model.layers=8 model.heads=4 model.channels=256 model.context=32 train.seq_len=32 train.batch=1 train.steps=1000000 \
    train.val_every=0 train.sample_every=0 train.save_every=0 run.device=replay run.out="$work/out" replay.forward_ms=1 \
    replay.backward_ms=1 comm.ranks_per_node=2 comm.bucket_bytes=512K

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# Those of the launcher's children that are ranks, as "rank process" lines
ranks_of() {
    local process rank
    for process in $(grep -lx "PPid:[[:space:]]*$1" /proc/[0-9]*/status 2>/dev/null | cut -d/ -f3); do
        rank=$(tr '\0' '\n' <"/proc/$process/environ" 2>/dev/null | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
        [ -z "$rank" ] || echo "$rank $process"
    done
}

steps_under_way() { [ "$(cat "$work/out/log.jsonl" 2>/dev/null | wc -l)" -ge 2 ]; }

# start NAME ARGS...: four ranks, returns somewhere in a later step; sets launcher and processes, or nothing runs
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
    [ "$(wc -l <<<"$processes")" = 4 ] && return
    kill $launcher
    wait $launcher
    fail "$name: expected four ranks, found '$processes'" "$work/log"
    return 1
}

process_of() { sed -n "s/^$1 //p" <<<"$processes"; }

# kill_one NAME RANK ARGS...: leaves what it took in took_ms
kill_one() {
    local name=$1 victim=$2 process line start_ms
    shift 2
    start "$name" "$@" || return
    line="train: rank $victim (process $(process_of "$victim") on [^ ]*) ended unexpectedly; the run stops"
    start_ms=$(now_ms)
    kill -9 "$(process_of "$victim")"
    for process in $(cut -d' ' -f2 <<<"$processes"); do
        while alive "$process" && [ $(($(now_ms) - start_ms)) -lt 10000 ]; do sleep 0.02; done
        alive "$process" && kill -9 "$process" &&
            fail "$name: a rank lives 10 s after rank $victim was killed" "$work/log"
    done
    took_ms=$(($(now_ms) - start_ms))
    wait $launcher && fail "$name: exit code 0" "$work/log"
    # the launcher sees it too, and ends rank 0 by SIGTERM, which may say how far the run has come
    [ "$(grep '^train: ' "$work/log" | grep -cv '^train: stopped after step ')" = 1 ] && grep -qx "$line" "$work/log" ||
        fail "$name: expected the line '$line'" "$work/log"
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

if start 'end by mpirun' comm.algorithm=ring; then
    kill $launcher
    wait $launcher && fail 'end by mpirun: exit code 0' "$work/log"
fi
grep '^train: rank' "$work/log" && fail 'end by mpirun: no rank is to blame' "$work/log"

finish
