# What the scripts tests/test_*.sh begin with: they source it. Where programs are, the folder $work, which goes at the end,
# failures and how to end.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
BUILD=${BUILD:-build} TRAIN=${TRAIN:-./train} MPI=${MPI:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# fail TEXT [FILE...]: and what the files hold
fail() {
    echo "FAIL: $1"
    [ $# = 1 ] || cat -- "${@:2}" | tail -20 | sed 's/^/    /'
    failures=$((failures + 1))
}
skip() { echo "skipped: $1"; exit 0; }
needs_mpi() { [ "$MPI" = 1 ] || skip 'built without MPI'; }
alive() { grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null; } # PROCESS, and not a zombie
finish() { [ $failures = 0 ] && exit; echo "$failures failure(s)"; exit 1; }

# ---- the trainer ----

# A small text, in bytes: $work/t_train_*.bin and t_val_*.bin
prose() {
    "$BUILD/prepare" --tokenizer bytes --out "$work" --val 0.1 t tests/data/emma.txt >/dev/null && return
    fail prepare
    finish
}

# tiny SECTION.KEY=VALUE...: that text, and $work/t.cfg for a tiny model on it
tiny() {
    prose
    printf '%s\n' model.layers=2 model.heads=2 model.channels=32 model.vocab=257 data.train="$work/t_train_*.bin" \
        data.tokenizer=bytes run.threads=1 comm.calibrate=no "$@" |
        tac | sort -su -t= -k1,1 | sed -E 's/^([a-z]+)\.([^=]+)=/[\1]\n\2 = /' >"$work/t.cfg" # the last of a key
}

# train NAME RANKS HOW ARGS...: HOW is loop or mpi, which is loop where MPI was left out; out goes to $work/NAME
train() {
    local launch=() name=$1 ranks=$2 arguments=("$work/t.cfg" run.out="$work/$1")
    [ "$3" = mpi ] && [ "$MPI" = 1 ] && launch=(mpirun --oversubscribe -n "$ranks") || arguments+=(loop.ranks="$ranks")
    shift 3
    "${launch[@]}" "$TRAIN" "${arguments[@]}" "$@" >"$work/$name.log" 2>&1 || fail "$name: exit $?" "$work/$name.log"
}
# values NAME KEY: of all steps
values() { grep -o "\"$2\":[^,}]*" "$work/$1/log.jsonl" | cut -d: -f2; }
same_model() { cmp "$work/$1/model.bin" "$work/$2/model.bin" || fail "$1 and $2 end with different models"; }
