#!/bin/bash
# A program whose output cannot be written, or is closed, says so and fails, and train refuses to write over what it
# reads or writes elsewhere; each program's --help names it and ends with 0, however little memory there is.
. "$(dirname "$0")/script.sh"

# full NAME COMMAND...: stdout is /dev/full
full() {
    local name=$1
    shift
    "$@" >/dev/full 2>"$work/stderr"
    local code=$?
    [ $code = 1 ] && grep -q "^$name: standard output: not written: " "$work/stderr" &&
        [ "$(grep -c "^$name: " "$work/stderr")" = 1 ] || fail "$*: exit $code" "$work/stderr"
}

for script in bench/{own_host,cluster,speedup,accuracy,gpu} bench/*.sh tests/mutants.sh; do
    "$script" --help >"$work/help" && grep -q "$script" "$work/help" || fail "$script --help: exit $?"
done
for words in "scaling.sh -n 0|-n: expected a number" "scaling.sh -n|-n: expected a number" \
    "scaling.sh -n 1 t.cfg|-n: expected two ranks" "scaling.sh --foo|unknown option '--foo'" \
    "scaling.sh -b 3 t.cfg|expected -b to be a multiple" "embedding.sh -g 0|-g: expected GB/s" \
    "embedding.sh -s|-s: expected a number" "embedding.sh 5|unknown option '5'"; do
    # shellcheck disable=SC2086
    bench/${words%%|*} >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && [ ! -s "$work/stdout" ] && [ "$(wc -l <"$work/stderr")" = 1 ] &&
        grep -q "^${words%%.sh*}: ${words#*|}" "$work/stderr" || fail "$words" "$work/stdout" "$work/stderr"
done
tests/mutants.sh mean_is_a_sum zzz >"$work/stdout" 2>"$work/stderr"
[ $? = 2 ] && [ ! -s "$work/stdout" ] && grep -q '^mutants: no fault .* called zzz' "$work/stderr" ||
    fail 'mutants zzz' "$work/stdout" "$work/stderr"
for program in "$TRAIN" "$BUILD"/{generate,prepare,tokenize,extract_text,step,compressors,allreduce,overlap,gpu_rates,golden}; do
    [ -x "$program" ] || continue # gpu_rates is built for GPUs only
    name=$(basename "$program")
    "$program" --help >"$work/help" || fail "$name --help: exit $?"
    head -1 "$work/help" | grep -q "^usage: $name \[" || fail "$name --help: $(head -1 "$work/help")"
    [ "$program" = "$TRAIN" ] || grep -q "^  --help  *this text$" "$work/help" || fail "$name --help: not itself"
    full "$name" "$program" --help
done
echo "Hello world" >"$work/text"
full tokenize "$BUILD/tokenize" --tokenizer bytes <"$work/text"
full prepare "$BUILD/prepare" --tokenizer bytes --out "$work" --val 0 t tests/data/emma.txt
tiny model.layers=1 model.heads=1 model.channels=8 model.context=8 train.batch=1 train.seq_len=8 train.steps=2 run.out="$work/out"
full train "$TRAIN" --plan "$work/t.cfg"
full train "$TRAIN" "$work/t.cfg"
[ -e "$work/out/model.bin" ] || fail "the model is lost with the output"
full generate "$BUILD/generate" --tokenizer bytes --max_tokens 4 "$work/out/model.bin" Hi
# A closed stream is none of the files that the run opens.
for closed in '>&- </dev/null' '>&- <&-'; do
    eval "\"\$TRAIN\" \"\$work/t.cfg\" run.out=\"\$work/closed\" $closed" 2>"$work/stderr"
    [ $? = 1 ] && [ "$(grep -c '^train: standard output: not written: ' "$work/stderr")" = 1 ] &&
        [ -e "$work/closed/.lock" ] && [ ! -s "$work/closed/.lock" ] && cmp "$work/out/model.bin" "$work/closed/model.bin" ||
        fail "train $closed" "$work/stderr" "$work/closed/.lock"
    rm -rf "$work/closed"
done
"$TRAIN" "$work/t.cfg" run.out="$work/closed" train.lr=x >&- 2>&- <&-
[ $? = 2 ] || fail "bad input with every stream closed: exit $?"
"$BUILD/prepare" --tokenizer bytes --out "$work/closed" t - <&- >"$work/stdout" 2>"$work/stderr"
[ $? != 0 ] && grep -q '^prepare: .*standard input: ' "$work/stderr" || fail 'prepare <&-' "$work/stdout" "$work/stderr"
if [ $MPI = 1 ]; then # mpirun's own stdout stays what it is
    mpirun --oversubscribe -n 2 sh -c "exec $TRAIN $work/t.cfg >/dev/full" 2>"$work/stderr" &&
        fail "train under mpirun: exit 0"
    [ "$(grep -c '^train: ' "$work/stderr")" = 1 ] || fail "train under mpirun" "$work/stderr"
    mpirun --oversubscribe -n 2 "$TRAIN" --plan "$work/t.cfg" loop.ranks=3 >"$work/stdout" 2>"$work/stderr" &&
        [ "$(cat "$work/stderr")" = 'warning: loop.ranks = 3 is not looked at: the launcher started 2 ranks' ] ||
        fail "loop.ranks under mpirun" "$work/stderr"
fi

# refused TEXT ARGS...: exit 2, one line that holds TEXT, nothing written
refused() {
    local text=$1
    shift
    "$TRAIN" "$work/t.cfg" run.out="$work/new" "$@" >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && [ "$(wc -l <"$work/stderr")" = 1 ] && grep -qF -- "$text" "$work/stderr" ||
        fail "$*: expected '$text'" "$work/stderr"
    [ ! -s "$work/stdout" ] && [ ! -e "$work/new" ] && sha256sum --quiet -c "$work/sums" || fail "$*: written"
}
sha256sum "$work/t.cfg" "$work"/*.bin "$work/out/model.bin" >"$work/sums"
own='expected a file that the run does not write in its folder itself, found'
refused "command line: log.trace: $own $work/new/log.jsonl" log.trace="$work/new/log.jsonl"
refused "log.profile: $own $work/new/model.bin" log.profile="$work/new/model.bin"
refused "log.trace: $own $work/./out/state_00000002.bin" log.trace="$work/./out/state_00000002.bin" run.out="$work/out"
refused "log.profile: expected another file than log.trace" log.trace="$work/log" log.profile="$work/./log"
refused "log.trace: expected a file of its own, found that of the config file" log.trace="$work/out/../t.cfg"
refused "log.profile: expected a file of its own, found that of model.init" model.init="$work/out/model.bin" \
    log.profile="$work/./out/model.bin"
refused "log.trace: expected a file of its own, found a data shard" log.trace="$work/t_train_000000.bin"
refused "log.trace: expected a file in a folder that is there" log.trace="$work/none/trace"
refused "log.trace: expected a regular file, or none, to write to, found /dev/null" log.trace=/dev/null
ln -s "$work/help" "$work/link"
refused "log.trace: expected a regular file, or none, to write to, found $work/link" log.trace="$work/link"
refused "run.out: expected another folder than that of model.init" model.init="$work/out/model.bin" run.out="$work/out"
mkdir "$work/mine"
cp "$work/t_train_000000.bin" "$work/mine/model_train_000000.bin" # not a checkpoint without its state
"$TRAIN" "$work/t.cfg" data.train="$work/mine/model_*.bin" run.out="$work/mine" log.trace="$work/mine/trace" \
    >"$work/log" 2>&1 && [ -e "$work/mine/trace" ] && [ -e "$work/mine/model_train_000000.bin" ] || fail "a shard in the run's folder" "$work/log"

finish
