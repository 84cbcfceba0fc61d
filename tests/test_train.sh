#!/bin/bash
# ./train end to end on a tiny model and real text: ranks, accumulation and algorithms against one rank; determinism;
# resume; the one clear line for bad input.
. "$(dirname "$0")/script.sh"
cp tests/data/emma.txt "$work/text.txt"
tiny model.context=40 data.val="$work/t_val_*.bin" train.seq_len=32 train.batch=12 train.global_batch=768 \
    train.steps=20 train.val_every=10 train.val_batches=2 optim.lr=3e-3 optim.warmup=5 comm.verify_every=1

# same NAME REFERENCE KEY: values of all steps equal to 1e-5 relative; at least one, none missing, no NaN
same() {
    paste <(values "$2" "$3") <(values "$1" "$3") | awk -v name="$1 against $2: $3" '
        { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || !(d <= 1e-5 * $1)) { print "FAIL: " name ", step " NR ": " $0; bad = 1 } }
        END { if (NR == 0) { print "FAIL: " name ": no values"; bad = 1 } exit bad }' || failures=$((failures + 1))
}

# Trap: norm reduced twice, wrong clip (twinkle#290): grad_norm, which clips in the first steps, is one rank's.
echo "- ranks x accumulation x algorithm against one rank"
train one 1 loop train.batch=24
[ "$(values one loss | wc -l)" = 20 ] || fail "expected 20 steps"
for ranks in 1 2 3 4; do
    for micro in 1 2; do
        for algorithm in naive native ring; do
            how=loop # native is MPI's own all-reduce
            [ $MPI = 0 ] && [ $algorithm = native ] && continue
            [ $MPI = 0 ] || { [ $algorithm != native ] && [ $micro = 2 ]; } || how=mpi
            name=$algorithm.$ranks.$micro.$how
            train $name $ranks $how comm.algorithm=$algorithm train.batch=$((24 / ranks / micro)) \
                train.val_batches=$((2 * ranks * micro))
            same $name one loss
            same $name one grad_norm
            same $name one val_loss
        done
    done
done

echo "- every algorithm on 2 x 2 ranks, overlap and bucket sizes"
for algorithm in naive iallreduce ring tree reduce_scatter hierarchical auto; do
    how=loop
    [ $MPI = 0 ] && [ $algorithm = iallreduce ] && continue
    [ $MPI = 1 ] && [ $algorithm != naive ] && how=mpi
    train $algorithm.2x2 4 $how comm.algorithm=$algorithm comm.ranks_per_node=2 comm.bucket_bytes=20K train.batch=6 \
        train.val_batches=8 log.trace="$work/$algorithm.json"
    same $algorithm.2x2 one loss
    same $algorithm.2x2 one grad_norm
done
[ $MPI = 0 ] || grep -q '"X","name":"all-reduce, bucket 1"' "$work/iallreduce.json" || fail "a trace of MPI's all-reduce"
buckets=$(sed -n 's/^  sync .* \([0-9]*\) buckets of .*, embedding in two$/\1/p' "$work/auto.2x2.log")
[ "$(grep -c '^  [0-9][0-9]*  ' "$work/auto.2x2.log")" = "$buckets" ] && [ "$(grep -c '^  lookup  ' "$work/auto.2x2.log")" = 1 ] ||
    fail "the header says $buckets buckets, the closing table: $(sed -n '/gradient buckets/,$p' "$work/auto.2x2.log")"
train leader.2x2 4 loop comm.algorithm=hierarchical comm.leader=yes comm.ranks_per_node=2 train.batch=6 train.val_batches=8
same leader.2x2 one loss
train unequal 4 loop comm.ranks_per_node=1,3 comm.bucket_bytes=20K train.batch=6 train.val_batches=8
same unequal one loss
train blocking.2x2 4 loop comm.ranks_per_node=2 comm.overlap=no comm.bucket_bytes=1G train.batch=6 train.val_batches=8
cmp "$work/blocking.2x2/model.bin" "$work/auto.2x2/model.bin" || fail "overlap or bucket size changes the result"

# Trap: uneven last batch (pytorch#33148, #38174): of 7 batches rank 3 has one fewer.
echo "- validation dealt out unevenly: the mean over tokens, no hang"
train uneven.one 1 loop train.batch=3 train.val_batches=7
train uneven 4 loop train.batch=3 train.val_batches=7
same uneven uneven.one val_loss

# Trap: sync fires on the first micro-batch (InfiniTrain#183, #213; FunASR#3472).
echo "- accumulation x overlap x compressor: the bytes of one reduction, near one micro-step's losses, overlap or not"
echo "  without compression one rank's, ZeRO-1 or not"
train alone 1 loop train.batch=24 train.val_every=0 train.steps=8
for compress in none "none optim.zero=1" bf16 int8 int4 "topk comm.topk_density=0.1"; do
    for micro in 1 2 3 4; do
        for overlap in yes no; do
            train micro.$overlap 2 loop train.batch=$((12 / micro)) train.val_every=0 train.steps=8 comm.overlap=$overlap \
                comm.ranks_per_node=1 comm.warmup_steps=0 comm.compress=$compress
        done
        same_model micro.yes micro.no
        [ $micro != 1 ] || cp -r "$work/micro.no/." "$work/whole.batch"
        for key in bytes_inter loss; do paste <(values whole.batch $key) <(values micro.yes $key); done |
            awk 'NR <= 8 ? $1 != $2 || $1 == 0 : !(($1 / $2 - 1) ^ 2 < 1e-6) { exit 1 } END { exit NR != 16 }' ||
            fail "$compress, $micro micro-steps"
        [ "${compress%% *}" != none ] || same micro.yes alone loss
        rm -rf "$work"/micro.*
    done
done

echo "- two runs give the same bits"
train again 3 loop comm.algorithm=ring train.batch=4
cmp "$work/again/model.bin" "$work/ring.3.2.loop/model.bin" || fail "two runs differ"

echo "- recompute gives the same bits"
for level in gelu norms layers; do
    train $level 1 loop train.batch=24 train.recompute=$level
    cmp "$work/$level/model.bin" "$work/one/model.bin" || fail "train.recompute=$level differs"
done

echo "- resume is exact, also with other ranks"
train whole 2 loop train.batch=12 train.save_every=5 train.keep=3
[ "$(ls "$work/whole" | grep -c '^state_')" = 3 ] || fail "expected 3 checkpoints to be kept"
cp -r "$work/whole" "$work/resumed"
rm "$work/resumed"/*_000000{15,20}.bin "$work/resumed/model.bin"
train resumed 2 loop train.batch=12 train.save_every=5 train.keep=3 run.resume=yes
cmp "$work/resumed/model.bin" "$work/whole/model.bin" || fail "resume differs"
cmp "$work/resumed/state_00000020.bin" "$work/whole/state_00000020.bin" || fail "resumed state differs"
[ "$(values resumed loss)" = "$(values whole loss)" ] || fail "the resumed log differs"
rm "$work/resumed"/*_000000{15,20}.bin
train resumed 3 loop train.batch=8 run.resume=yes
same resumed whole loss
! grep "since its checkpoint" "$work/resumed.log" || fail "nothing has changed that is to be told"
train resumed 2 loop run.resume=yes run.seed=2 optim.lr=1e-3 train.global_batch=1536 data.train="$work/t_*.bin"
changes='run.seed was 1, is 2; optim.lr was 0.003, is 0.001; train.global_batch was 768, is 1536; data.train_tokens was'
grep -q "^warning: $work/resumed: since its checkpoint, $changes [0-9]*, is [0-9]*$" "$work/resumed.log" ||
    fail "expected '$changes'" "$work/resumed.log"

echo "- a folder belongs to one run; files that do not belong together are refused"
refuse_in() { # TEXT ARGS...: exit 2 with that text
    local text=$1
    shift
    "$TRAIN" "$work/t.cfg" "$@" >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && grep -qF -- "$text" "$work/stderr" || { fail "expected '$text'"; cat "$work/stderr"; }
}
refuse_in "holds checkpoints of an earlier run, up to step 20" run.out="$work/whole"
refuse_in "train.steps: expected at least the 20 steps" run.out="$work/whole" run.resume=yes train.steps=10
refuse_in "expected train.seq_len = 32" run.out="$work/whole" run.resume=yes train.seq_len=16 train.batch=24
cp -r "$work/whole" "$work/mixed"
cp "$work/mixed/model_00000015.bin" "$work/mixed/model_00000020.bin"
refuse_in "expected the state of the model file beside it" run.out="$work/mixed" run.resume=yes
touch "$work/whole/model_00000007.bin" "$work/whole/state_00000020.bin.1.tmp"
flock "$work/whole/.lock" "$TRAIN" "$work/t.cfg" run.out="$work/whole" run.resume=yes >"$work/stdout" 2>"$work/stderr"
grep -q "another run is writing to this folder" "$work/stderr" || fail "two runs in one folder"
train whole 1 loop run.resume=yes
ls "$work/whole" | grep -q 'tmp$\|00000007' && fail "leftovers of a killed run stay"
if [ $MPI = 1 ]; then
    # not mpirun -n 1 ... : -n 1 ..., of which Open MPI 5.0.7 dies
    # shellcheck disable=SC2016
    mpirun --oversubscribe -n 2 sh -c '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || set -- "$@" train.batch=4; exec "$@"' sh \
        "$TRAIN" "$work/t.cfg" >"$work/stdout" 2>"$work/stderr"
    grep -q "settings (config file and command line): rank 1" "$work/stderr" || fail "ranks with different settings"
fi

echo "- start from a model file"
train first 1 loop train.steps=1 model.init="$work/one/model.bin"
values first loss | awk -v last="$(values one loss | tail -1)" '{ exit !($1 < last * 1.2) }' || fail "init from a file"

echo "- shards of 129 and 65 tokens, resume in the second"
dd if="$work/t_train_000000.bin" bs=1 skip=1024 count=388 of="$work/tokens" 2>/dev/null
shard() { # COUNT FILE [skip tokens]
    { printf '\x88\xd8\x34\x01\x01\0\0\0'; printf "\\x$(printf %02x $(($1 % 256)))\\x$(printf %02x $(($1 / 256)))\0\0"
      head -c 1012 /dev/zero; dd if="$work/tokens" bs=2 skip="${3:-0}" count="$1" 2>/dev/null; } >"$2"
}
mkdir "$work/small"
shard 129 "$work/small/a_train_0.bin"
shard 65 "$work/small/a_train_1.bin" 129
small="data.train=$work/small/a_train_*.bin train.batch=4 train.seq_len=8 train.global_batch=0 train.val_every=0"
train small 1 loop $small train.steps=9 train.save_every=5
cp -r "$work/small" "$work/small2" 2>/dev/null
rm -f "$work/small/model.bin" "$work/small/"*_00000009.bin
train small 1 loop $small train.steps=9 train.save_every=5 run.resume=yes
cmp "$work/small/model.bin" "$work/small2/model.bin" || fail "resume in the second shard differs"

# refused TEXT ARGS...: exit 2, one line on stderr that holds TEXT, no output folder; refused_everywhere: under mpirun too,
# which takes its time to tidy up after a job that failed
refused_everywhere() { refused "$@"; [ $MPI = 0 ] || refused "$@" --mpi; }
refused() {
    local text=$1 how=
    shift
    [ "${*: -1}" = --mpi ] && how=mpi && set -- "${@:1:$#-1}"
    local command=("$TRAIN")
    [ -z "$how" ] || command=(mpirun --oversubscribe -n 2 "$TRAIN")
    "${command[@]}" "$@" run.out="$work/refused" >"$work/stdout" 2>"$work/stderr"
    local code=$?
    [ $code = 2 ] || fail "expected exit 2, found $code: $* $how"
    # mpirun adds lines of its own; ours begin with the program's name
    [ "$(grep -c '^train: ' "$work/stderr")" = 1 ] || { fail "expected one line: $* $how"; cat "$work/stderr"; }
    grep -qF -- "$text" "$work/stderr" || { fail "expected '$text'"; cat "$work/stderr"; }
    [ -n "$how" ] || [ "$(wc -l <"$work/stderr")" = 1 ] || { fail "more than one line: $*"; cat "$work/stderr"; }
    [ ! -e "$work/refused" ] || fail "files were left behind: $*"
}
echo "- bad input"
head -c 100 README.md >"$work/text100"
head -c 2000 "$work/t_train_000000.bin" >"$work/short_train_0.bin"
head -c 3000 "$work/one/model.bin" >"$work/short_model.bin"
refused "expected a config file"
refused_everywhere "/nonexistent.cfg: cannot read" /nonexistent.cfg
refused "unknown key 'batsh' in section [train]" "$work/t.cfg" train.batsh=3
refused "train.batch: expected an integer in [1, 65536], found '0'" "$work/t.cfg" train.batch=0
refused "expected a multiple of 64 tokens" "$work/t.cfg" train.batch=1 loop.ranks=2 train.global_batch=100 train.seq_len=32
refused_everywhere "no file matches" "$work/t.cfg" data.train="$work/none_*.bin"
refused "make data" "$work/t.cfg" data.train="$work/none_*.bin"
refused "text100" "$work/t.cfg" data.train="$work/text100"
refused "short_train_0.bin" "$work/t.cfg" data.train="$work/short_train_*.bin"
refused_everywhere "t_train_000000.bin" "$work/t.cfg" data.tokenizer=none model.vocab=100
refused "text100" "$work/t.cfg" model.init="$work/text100"
refused_everywhere "short_model.bin" "$work/t.cfg" model.init="$work/short_model.bin"
refused "missing.bin" "$work/t.cfg" model.init="$work/missing.bin"
refused "data.tokenizer: bytes has 257 tokens, the model 300" "$work/t.cfg" model.vocab=300
refused "model.heads" "$work/t.cfg" model.heads=5
refused "train.seq_len: expected at most the model's context, 40, found 64" "$work/t.cfg" train.seq_len=64
refused_everywhere "GB are free" "$work/t.cfg" model.layers=400 model.channels=8192 data.tokenizer=none
refused "a step's tokens alone take 8000.00 GB; lower train.global_batch" "$work/t.cfg" train.batch=1 \
    train.global_batch=999999995904
refused "command line: run.out: expected a name of at most 255 bytes, found ''" "$work/t.cfg" run.out=
refused "model.init: expected a name of at most 255 bytes, found ''" "$work/t.cfg" model.init=
refused "data.tokenizer: expected a name" "$work/t.cfg" data.tokenizer=
refused "(1 rank x batch 1 x" "$work/t.cfg" train.batch=1 train.global_batch=100
refused "comm.algorithm: expected one of" "$work/t.cfg" comm.algorithm=magic
refused "loop.faults: expected a rank below 2, found 2" "$work/t.cfg" loop.ranks=2 loop.faults=delay:rank=2,ms=5
refused "comm.algorithm = native: the loop transport has no all-reduce of its own" "$work/t.cfg" loop.ranks=4 \
    run.threads=8 train.batch=6 comm.algorithm=native # which would bring a warning about threads
[ ! -s "$work/stdout" ] || fail "a header of a run that is refused"
"$TRAIN" "$work/t.cfg" run.out=/proc/tandem >"$work/stdout" 2>"$work/stderr"
[ $? = 2 ] && grep -q "/proc/tandem: folder is not writable" "$work/stderr" || fail "a folder that is not writable"

echo "- the step bench: its rows, and no model that does not fit"
"$BUILD/step" --batch 2 --seq_len 8 --steps 1 --json "$work/t.cfg" >"$work/stdout" || fail "step: exit $?"
grep -q '"fraction_of_sgemm": [0-9]' "$work/stdout" || fail "step: $(cat "$work/stdout")"
"$BUILD/step" --seq_len 32 "$work/t.cfg" model.layers=400 model.channels=8192 >"$work/stdout" 2>"$work/stderr"
[ $? = 2 ] && grep -q "GB are free" "$work/stderr" || fail "step with a large model: $(cat "$work/stderr")"
"$BUILD/step" --batch 65536 --seq_len 40000 "$work/t.cfg" model.context=40000 2>"$work/stderr"
[ $? = 2 ] && grep -q "tokens per step" "$work/stderr" || fail "step with many tokens: $(cat "$work/stderr")"

echo "- a model of NaN has no text"
{ head -c 1024 "$work/one/model.bin"; tail -c +1025 "$work/one/model.bin" | tr '\0-\377' '\377'; } >"$work/nan.bin"
"$BUILD/generate" --tokenizer bytes "$work/nan.bin" Hi >"$work/stdout" 2>"$work/stderr"
[ $? = 1 ] && [ "$(cat "$work/stdout")" = Hi ] && grep -q "generate: the model's logits are not finite" "$work/stderr" ||
    fail "generate from NaN: $(cat "$work/stdout" "$work/stderr")"
"$TRAIN" "$work/t.cfg" run.out="$work/nan" train.batch=24 train.steps=1 train.val_every=1 model.init="$work/nan.bin" \
    >"$work/nan.log" 2>&1
[ $? = 1 ] && grep -q "^train: every step was skipped (1 of them), for a loss" "$work/nan.log" ||
    fail "a step in vain" "$work/nan.log"
grep -q '"val_loss":null' "$work/nan/log.jsonl" && grep -q "val nan" "$work/nan.log" || fail "val_loss of NaN"

echo "- help and plan"
"$TRAIN" --help >"$work/help" || fail "--help: exit $?"
for key in threads global_batch weight_decay algorithm ranks jsonl; do
    grep -q "^  $key " "$work/help" || fail "--help does not list $key"
done
"$TRAIN" --plan "$work/t.cfg" run.out="$work/plan" >"$work/stdout" || fail "--plan: exit $?"
[ ! -e "$work/plan" ] && grep -q parameters "$work/stdout" || fail "--plan"
"$TRAIN" --plan "$work/t.cfg" run.out="$work/plan" loop.ranks=4 comm.ranks_per_node=2 comm.bucket_bytes=20K \
    train.batch=6 >"$work/stdout" || fail "--plan: exit $?"
grep -q '^  sync  .* buckets of ' "$work/stdout" &&
    diff <(grep '^  sync  ' "$work/stdout") <(grep '^  sync  ' "$work/auto.2x2.log") || fail "--plan: the sync" "$work/stdout"

finish
