#!/bin/bash
# What the tied embedding's two gradients save: bytes between nodes and exposed communication of a step of GPT-2 124M,
# with comm.split_embedding off and on. Real communication between 2 nodes of 4 ranks that are threads, with links of
# -g GB/s between the nodes; compute is replayed, backward in -b ms. Four cases: f32; ZeRO-1; gradients accumulated over
# 3 micro-steps; and tokens of so many kinds that the lookup goes with the dense gradient. Needs 10 GB of memory.
#     bench/embedding.sh [-g GB_PER_S] [-b BACKWARD_MS] [-s STEPS] [--json]
set -eu
rate=0.5 backward=3000 steps=4 json=
stop() { echo "embedding: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    -g) [[ ${2-} =~ ^[0-9]{1,5}([.][0-9]+)?$ && $2 =~ [1-9] ]] || stop "-g: expected GB/s, found '${2-}'" ;;&
    -[bs]) [[ ${2-} =~ ^[1-9][0-9]{0,5}$ ]] || stop "$1: expected a number from 1, found '${2-}'" ;;&
    -g) rate=$2; shift 2 ;;
    -b) backward=$2; shift 2 ;;
    -s) steps=$2; shift 2 ;;
    --json) json=1; shift ;;
    --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) stop "unknown option '$1'; --help explains" ;;
    esac
done
[ -x ./train ] || stop "./train is missing here: make"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# one CASE SPLIT ARGS...: appends the medians over all steps but the first to $work/table
one() {
    local name=$1 split=$2
    shift 2
    ./train configs/gpt2.cfg run.out="$work/out" run.device=replay run.threads=1 \
        replay.forward_ms=$((backward / 2)) replay.backward_ms="$backward" loop.ranks=8 comm.ranks_per_node=4 \
        loop.latency_between_us=50 loop.gb_per_s_between="$rate" \
        train.batch=4 train.seq_len=256 train.global_batch=8192 train.steps=$((steps + 1)) \
        train.val_every=0 train.sample_every=0 train.save_every=0 comm.split_embedding="$split" "$@" \
        >"$work/log" 2>&1 ||
        { code=$?; echo "embedding: $(grep -m1 '^train: ' "$work/log" || tail -1 "$work/log")" >&2; exit $code; }
    for key in bytes_inter comm_ms comm_exposed_ms; do
        grep -o "\"$key\":[^,}]*" "$work/out/log.jsonl" | tail -n +2 | cut -d: -f2 | sort -g |
            awk '{ v[NR] = $1 } END { printf "%s\t", (v[int((NR + 1) / 2)] + v[int((NR + 2) / 2)]) / 2 }'
    done >"$work/values"
    printf '%s\t%s\t%s\n' "$name" "$split" "$(cat "$work/values")" >>"$work/table"
}

for split in no yes; do
    one "f32" $split
    one "ZeRO-1" $split optim.zero=1
    one "3 micro-steps" $split train.global_batch=24576
    one "union too large" $split train.batch=32 train.seq_len=1024 train.global_batch=4194304 replay.forward_ms=100 \
        replay.backward_ms=$((backward / 16)) train.steps=3
done
awk -F '\t' -v json="$json" '
    $2 == "no" { bytes[$1] = $3; comm[$1] = $4; exposed[$1] = $5; order[++n] = $1 }
    $2 == "yes" { new_bytes[$1] = $3; new_comm[$1] = $4; new_exposed[$1] = $5 }
    END {
        if (!json)
            printf "%-16s %12s %12s %10s %10s %10s\n", "case", "MB before", "MB after", "exposed", "after, ms", "ratio"
        for (i = 1; i <= n; i++) {
            c = order[i]
            if (json)
                printf "{\"case\": \"%s\", \"bytes_before\": %d, \"bytes_after\": %d, " \
                    "\"exposed_before_ms\": %.1f, \"exposed_after_ms\": %.1f}\n",
                    c, bytes[c], new_bytes[c], exposed[c], new_exposed[c]
            else
                printf "%-16s %12.1f %12.1f %10.1f %10.1f %10.2f\n", c, bytes[c] / 1e6, new_bytes[c] / 1e6, exposed[c],
                    new_exposed[c], new_exposed[c] / exposed[c]
        }
    }' "$work/table"
