#!/bin/bash
# Ctrl-C and SIGTERM in the middle of a run, or of setting it up: one line from rank 0 that says where the run can go
# on, the signal's exit code, no rank left.
. "$(dirname "$0")/script.sh"
set -m # each command its own process group: Ctrl-C reaches it and not the script

tiny model.layers=1 model.heads=1 model.channels=8 model.context=8 train.batch=1 train.seq_len=8 train.steps=1000000000

some_steps() { [ "$(cat "$work/out/log.jsonl" 2>/dev/null | wc -l)" -ge 8 ]; }
header_begins() { grep -q '^  model ' "$work/stdout"; }

signals=1
# interrupted SIGNAL CODE WHEN TEXT COMMAND ARGS...: COMMAND gets SIGNAL, $signals times, when that has come to pass
interrupted() {
    local signal=$1 code=$2 when=$3 text=$4 process tries=0
    shift 4
    rm -f "$work/stdout" # whose header would be taken for the new one's
    "$@" "$work/t.cfg" run.out="$work/out" >"$work/stdout" 2>"$work/log" &
    process=$!
    while ! $when && [ $tries -lt 400 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
    # shellcheck disable=SC2046
    kill -"$signal" $(yes $process | head -n "$signals") 2>"$work/ended"
    wait $process
    local found=$?
    [ $found = "$code" ] || [ "$code" = any ] || fail "$signal: $*: exit $found" "$work/log"
    [ "$(grep -c '^train: ' "$work/log")" = 1 ] && grep -q "^train: stopped $text$" "$work/log" ||
        fail "$signal: $*: expected '$text'" "$work/log"
    pgrep -f "run.out=$work/out" >/dev/null && fail "$signal: $*: a rank is left"
}
# running ...: once more, in a new folder, when it has taken some steps
running() {
    rm -rf "$work/out"
    interrupted "$1" "$2" some_steps "after step [0-9]*; $3" "${@:4}"
}

saved="the last checkpoint is of step [0-9]*, in $work/out: run.resume=yes goes on from it"
running INT 130 "there is no checkpoint (train.save_every)" "$TRAIN"
running INT 130 "$saved" "$TRAIN" loop.ranks=3 train.save_every=2
slow="loop.ranks=2 comm.ranks_per_node=1 loop.latency_between_us=100000" # each message of setting up takes its time
# shellcheck disable=SC2086
interrupted TERM 143 header_begins "while setting up, before any step; $saved" "$TRAIN" $slow run.resume=yes
rm -rf "$work/out"
# shellcheck disable=SC2086
interrupted INT 130 header_begins "while setting up, before any step" "$TRAIN" $slow
[ ! -e "$work/out/log.jsonl" ] || fail "setting up was over"
running TERM 143 "$saved" "$TRAIN" loop.ranks=2 train.save_every=2
step=$(sed -n 's/.*checkpoint is of step \([0-9]*\),.*/\1/p' "$work/log")
[ -e "$work/out/$(printf 'state_%08d.bin' "$step")" ] || fail "no checkpoint of step $step"
newest=$(ls "$work/out" | sed -n 's/^state_0*\([0-9]*\).bin$/\1/p' | tail -1) # one more may just have been completed
"$TRAIN" "$work/t.cfg" run.out="$work/out" train.steps=$((newest + 1)) run.resume=yes >"$work/log" 2>&1 &&
    grep -q "after step $newest$" "$work/log" || fail resumed "$work/log"
signals=500 # launchers send more than one, and other threads get those
for _ in 1 2 3; do
    running TERM 143 "there is no checkpoint (train.save_every)" "$TRAIN" loop.ranks=3
done
signals=1
if [ "$MPI" = 1 ]; then # the launcher ends its ranks by SIGTERM, and by SIGKILL a rank that waits for a disk meanwhile
    running INT any "there is no checkpoint (train.save_every)" mpirun --oversubscribe -n 2 "$TRAIN"
fi

finish
