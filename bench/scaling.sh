#!/bin/bash
# Tokens per second of N ranks against one, in one run: real training of FILE.cfg by mpirun, the cores of this machine
# shared out, the same tokens per step in both cases (sequences B in all, T tokens each), cases in turn, medians.
#     bench/scaling.sh [-n RANKS] [-b B] [-t T] [-s STEPS] [-r REPEATS] [--json] FILE.cfg [section.key=value ...]
set -eu
ranks=2 batch=4 seq_len=256 steps=4 repeats=3 json=
stop() { echo "scaling: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    -[nbtsr]) [[ ${2-} =~ ^[1-9][0-9]{0,5}$ ]] || stop "$1: expected a number from 1, found '${2-}'" ;;&
    -n) ranks=$2; shift 2 ;;
    -b) batch=$2; shift 2 ;;
    -t) seq_len=$2; shift 2 ;;
    -s) steps=$2; shift 2 ;;
    -r) repeats=$2; shift 2 ;;
    --json) json=1; shift ;;
    --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) stop "unknown option '$1'; --help explains" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || stop "expected a config file; --help explains"
[ "$ranks" -gt 1 ] || stop "-n: expected two ranks or more, found $ranks"
[ $((batch % ranks)) = 0 ] || stop "expected -b to be a multiple of -n, found $batch and $ranks"
[ -x ./train ] || stop "./train is missing here: make"
command -v mpirun >/dev/null || stop "mpirun is missing: apt-get install openmpi-bin"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# one RANKS ARGS...: appends the tokens per second of every step but the first to $work/RANKS
one() {
    local n=$1 bind=()
    shift
    [ "$n" = 1 ] && bind=(--bind-to none)
    mpirun --oversubscribe -n "$n" "${bind[@]}" ./train "$@" run.out="$work/out" train.batch=$((batch / n)) \
        train.seq_len="$seq_len" train.global_batch=0 train.steps=$((steps + 1)) train.val_every=0 \
        train.sample_every=0 train.save_every=0 >"$work/log" 2>&1 ||
        { code=$?; echo "scaling: $(grep -m1 '^train: ' "$work/log" || tail -1 "$work/log")" >&2; exit $code; }
    grep -o '"tokens_per_s":[^,]*' "$work/out/log.jsonl" | tail -n +2 | cut -d: -f2 >>"$work/$n"
}
median() { sort -g "$1" | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int((NR + 2) / 2)]) / 2 }'; }

for _ in $(seq "$repeats"); do
    one 1 "$@"
    one "$ranks" "$@"
done
awk -v n="$ranks" -v one="$(median "$work/1")" -v many="$(median "$work/$ranks")" -v json="$json" 'BEGIN {
    if (json) {
        printf "{\"ranks\": 1, \"tokens_per_s\": %.2f, \"fraction_of_one_rank\": 1}\n", one
        printf "{\"ranks\": %d, \"tokens_per_s\": %.2f, \"fraction_of_one_rank\": %.4f}\n", n, many, many / one
    } else {
        print "ranks  tokens/s  of one rank on all cores"
        printf "%5d  %8.1f  1\n%5d  %8.1f  %.3f\n", 1, one, n, many, many / one
    } }'
