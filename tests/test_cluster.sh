#!/bin/bash
# bench/cluster: training on two emulated nodes gives the bits of one node with the same grouping; exit codes pass
# through; one line for what is refused; nothing is left after success, failure, Ctrl-C, SIGTERM and kill -9; a link
# that is cut for a while only delays a run, and for good ends it with one line; bench/speedup and bench/accuracy write
# their tables. Called by `make test` with BUILD, TRAIN and MPI set.
. "$(dirname "$0")/script.sh"
needs_mpi
command -v pgrep >/dev/null || skip 'there is no pgrep'
# A cluster can be built here, or it says why not
bench/cluster --nodes 1 --ranks-per-node 1 --plain -- true 2>"$work/reason" || skip "$(tail -1 "$work/reason")"

mark=tandem_cluster_$$ # in the command line of every process that must be gone
network() { ip -oneline link 2>/dev/null | cut -d: -f2 | sort; mount | grep -c nsfs; }
before=$(network)
# nothing_left WHAT
nothing_left() {
    for ((i = 0; i < 30; i++)); do pgrep -f "$mark" >/dev/null && sleep 0.1; done # the killed may take a moment to go
    ! pgrep -f "$mark" >"$work/pids" || fail "$1: processes are left: $(tr '\n' ' ' <"$work/pids")"
    [ "$(network)" = "$before" ] || fail "$1: links or mounts are left"
    ! ls /dev/shm | grep -q '^cluster$' || fail "$1: /dev/shm/cluster is left"
    ! ls /tmp | grep -q '^ompi\.node' || fail "$1: Open MPI's files are left"
}

echo "- two nodes against one with the same grouping"
prose
shape="configs/demo.cfg data.train=$work/t_train_*.bin data.val=$work/t_val_*.bin train.global_batch=2048 train.steps=6
    train.val_every=0 train.sample_every=0 comm.algorithm=hierarchical comm.bucket_bytes=200K comm.verify_every=1"
set -f # the program looks for the data
# shellcheck disable=SC2086
mpirun --oversubscribe -n 4 "$TRAIN" $shape comm.ranks_per_node=2 run.out="$work/one" >"$work/log" 2>&1 ||
    { fail "one node"; cat "$work/log"; }
# shellcheck disable=SC2086
timeout 60 bench/cluster --nodes 2 --ranks-per-node 2 -- "$TRAIN" $shape run.out="$work/two" >"$work/log" 2>&1 ||
    { fail "two nodes: exit $?"; cat "$work/log"; }
set +f
grep -q '4 on 2 nodes over mpi' "$work/log" || fail "two nodes: MPI does not see them: $(head -5 "$work/log")"
losses() { grep -o '"loss":[^,]*' "$work/$1/log.jsonl"; }
[ "$(losses one | wc -l)" = 6 ] && [ "$(losses one)" = "$(losses two)" ] || fail "other losses on two nodes"
cmp "$work/one/model.bin" "$work/two/model.bin" || fail "another model on two nodes"
nothing_left success

echo "- host names, unequal nodes, exit codes"
# expect CODE OUTPUT ARGUMENTS...: what ranks print, in any order
expect() {
    # no stdin: mpirun of Open MPI 5.0.7 may wait for ever when it reads for a program that has ended at once
    timeout 60 bench/cluster "${@:3}" >"$work/out" 2>"$work/err" </dev/null
    local code=$?
    [ $code = "$1" ] || fail "expected exit code $1, found $code: ${*:3}: $(cat "$work/err")"
    [ "$(grep -v '^--\|^Primary\|non-zero\|^ *$' "$work/out" | sort | paste -sd' ')" = "$2" ] ||
        fail "expected '$2': ${*:3}: $(cat "$work/out")"
}
expect 0 'node0 node0 node1' --ranks-per-node 2,1 -- hostname
expect 3 '' --ranks-per-node 1 -- sh -c "exit 3 # $mark"
expect 5 'node0 slots=1 node1 slots=1 node2 slots=1' --plain --nodes 3 --ranks-per-node 1 -- \
    sh -c "cat \$CLUSTER_HOSTFILE; exit 5 # $mark"
expect 0 '0 reno' --plain -- sh -c 'cd /proc/sys/net/ipv4; cat tcp_congestion_control tcp_slow_start_after_idle'
nothing_left failure

echo "- what is refused"
refuse() { # [CODE] LINE ARGUMENTS...
    local code=2
    [[ $1 =~ ^[0-9]+$ ]] && { code=$1; shift; }
    bench/cluster "${@:2}" >"$work/out" 2>"$work/err"
    [ $? = $code ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -q -- "^cluster: .*$1" "$work/err" || fail "$*: $(cat "$work/err")"
}
refuse 'expected a command' --nodes 2
refuse 127 './nosuch: no program' -- ./nosuch
refuse 127 './README.md: no program' --plain -- ./README.md
refuse 'unknown option' --fast -- true
refuse 'found 2$' --nodes 3 --ranks-per-node 1,2 -- true
for rate in 1gigabyte 1kbit 101gbit 1.2.3mbit bit; do
    refuse '--rate: expected a rate from 1mbit to 100gbit' --rate $rate -- true
done
for latency in . 1.2.3 1000.5; do
    refuse "--latency: expected milliseconds in .0, 1000., found '$latency'" --latency $latency -- true
done
refuse '--down: expected' --down 2:1:1 -- true
refuse '--down: expected' --down 1:.:1 -- true
refuse '--nodes: expected a value' --nodes -- true
for words in '-- true' 'btl -- true' 'btl'; do
    # shellcheck disable=SC2086
    refuse '--mca: expected the name of a parameter and a value' --mca $words
done
"$PWD/bench/cluster" --help | grep -q -- '--ranks-per-node' || fail "--help"
# refuse_bench LINE NAME ARGUMENTS...: of bench/NAME
refuse_bench() {
    "bench/$2" "${@:3}" >"$work/out" 2>"$work/err"
    [ $? = 2 ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -q -- "^$2: $1" "$work/err" || fail "$*: $(cat "$work/err")"
    [ ! -s "$work/out" ] || fail "$*: it writes something"
}
for options in '--steps 2' '--repeats 0' '--nodes two' '--nodes 0' '--nodes 1' '--nodes' '--hostfile' '--flat 8' \
    '--flat 0' '--flat x' '--cases zzz' '--cases (' '--bucket x' '--bucket 3'; do
    # shellcheck disable=SC2086
    refuse_bench "${options%% *}: " speedup --out "$work/none" $options
done
refuse_bench "unknown option '--fast'; --help explains" speedup --fast
refuse_bench '--out: expected a folder that can be written to, found /dev/full/x' speedup --out /dev/full/x
(cd docs && ../bench/speedup --hostfile none) 2>&1 | grep -q "^speedup: --hostfile: $PWD/docs/none: " ||
    fail 'speedup: a file of another folder'
for options in '--only zzz' '--only' '--only f32.2 --short' '--steps x' '--steps 200' '--steps'; do
    # shellcheck disable=SC2086
    refuse_bench "${options%% *}: " accuracy $options
done
refuse_bench "unknown argument '--fast'; --help explains" accuracy --fast
ls data/prose_bytes_{train,val}_*.bin >/dev/null 2>&1 && # or it asks for them first
    refuse_bench 'command line: unknown section .foo.' accuracy --short foo.bar=1
for key in run.out train.steps comm.warmup_steps; do
    refuse_bench "$key: " accuracy --short $key=1
done
[ ! -e "$work/none" ] || fail "what is refused writes something"
bench/speedup --help | grep -q -- '--hostfile FILE' || fail "speedup --help"

echo "- bench/speedup and bench/accuracy: their tables and bars"
# In a tree of its own, whose out/ is not the user's and whose text is there
mkdir -p "$work/tree/data" "$work/tree/build"
ln -s "$PWD/bench" "$PWD/configs" "$PWD/tests" "$work/tree"
ln -s "$(realpath "$BUILD/prepare")" "$work/tree/build"
ln -s "$(realpath "$TRAIN")" "$work/tree/train"
for part in train val; do
    for file in "$work/t_$part"_*.bin; do cp "$file" "$work/tree/data/prose_bytes_${file##*/t_}"; done
done
# table NAME ROWS BARS HEADER
table() {
    [ "$(head -1 "$work/$1.csv")" = "$4" ] && [ "$(wc -l <"$work/$1.csv")" = $(($2 + 1)) ] ||
        fail "$1.csv" "$work/$1.csv" "$work/log"
    [ "$(grep -cE '^\| .* \| .* \| (ok|MISSED) \|$' "$work/$1.md")" = "$3" ] || fail "$1: bars" "$work/$1.md"
}
timeout 100 "$work/tree/bench/speedup" --ranks-per-node 1 --rate 10gbit --repeats 1 --steps 3 --flat 1 \
    --cases '^all with int8$' --out "$work" >"$work/log" 2>&1 || fail "speedup: exit $?" "$work/log"
table speedup 5 5 case,ranks,nodes,speedup,step_ms,comm_ms,exposed_ms,bytes_inter,bytes_intra,predicted_ms
nothing_left speedup
"$work/tree/bench/accuracy" --short --only '@(f32|int8).1' train.batch=1 train.val_batches=2 >"$work/log" 2>&1 ||
    fail "accuracy: exit $?" "$work/log"
cp "$work/tree/out/accuracy_short/accuracy".{csv,md} "$work"
table accuracy 2 1 \
    case,start,error_feedback,seed,steps,val_loss,difference_percent,volume_percent,gain_last_quarter_percent

echo "- killed"
set -m # groups of their own, to which Ctrl-C goes
for signal in INT TERM KILL; do
    bench/cluster --ranks-per-node 1 -- sh -c "touch $work/\$(hostname).\$PPID; sleep 300 # $mark" >/dev/null 2>&1 &
    cluster=$!
    for ((i = 0; i < 100 && $(ls "$work" | grep -c '^node[01]\.') < 2; i++)); do sleep 0.1; done
    [ "$(pgrep -f "sleep 300 # $mark" | wc -l)" -ge 2 ] || fail "$signal: not started"
    kill -$signal -- -$cluster
    wait $cluster 2>/dev/null
    code=$?
    [ $signal = KILL ] && sleep 0.3 # nobody is left who could have waited
    [ $code = $((128 + $(kill -l $signal))) ] || fail "$signal: exit code $code"
    nothing_left $signal
    rm -f "$work"/node*
done
set +m

echo "- a link that is cut for a second"
timeout 60 bench/cluster --ranks-per-node 1 --down 1:1.2:1 -- "$BUILD/allreduce" -b 1M -e 1M -n 150 --algorithm ring \
    >"$work/out" 2>"$work/err" || fail "cut: exit $?: $(cat "$work/err")"
grep -q 'node1 is cut off' "$work/err" && grep -q 'node1 is back' "$work/err" && grep -q ' ring .* 0 ' "$work/out" ||
    fail "cut: $(cat "$work/err" "$work/out")"
nothing_left cut

echo "- a link that is cut in mid-step of a training run, for two seconds and for good"
tiny model.context=32 train.seq_len=32 train.batch=2 train.steps=20 comm.algorithm=hierarchical comm.timeout_s=30
train uncut 2 mpi comm.ranks_per_node=1
# cut_run NAME DOWN ARGUMENTS...: a step takes 0.25 s on this link
cut_run() {
    timeout 60 bench/cluster --ranks-per-node 1 --rate 5mbit --down "$2" -- "$TRAIN" "$work/t.cfg" run.out="$work/$1" \
        "${@:3}" >"$work/log" 2>&1
}
cut_run delayed 1:2:2 || fail "delayed: exit $?" "$work/log"
grep -q 'node1 is cut off' "$work/log" && grep -q 'node1 is back' "$work/log" || fail "delayed" "$work/log"
[ "$(losses uncut | wc -l)" = 20 ] && [ "$(losses delayed)" = "$(losses uncut)" ] || fail "delayed: other losses"
nothing_left delayed
cut_run cut 1:3:ever train.steps=1000 comm.timeout_s=2
[ $? = 1 ] || fail "cut for good: not exit 1" "$work/log"
line='^train: rank 0: no answer from rank 1 for 2 s (comm.timeout_s), node 1: bucket [0-9]* of step [0-9]* waits$'
[ "$(grep -c '^train: ' "$work/log")" = 1 ] && grep -q "$line" "$work/log" || fail "cut for good" "$work/log"
nothing_left 'cut for good'

finish
