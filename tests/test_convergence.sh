#!/bin/bash
# 200 steps of configs/demo.cfg's model on real text, 2x2 ranks, compressed with error feedback: the last loss against
# f32's. Sequences of 64 instead of 128 and batches of 2, for time.
#
# bf16, int8 and int4 compress from the first step, which is harder than what a user gets. Top-k runs as a user gets it,
# after the learning-rate warm-up (100 steps in configs/demo.cfg): what it leaves behind comes some 1 / density steps
# late, so the steep gradients of the first steps would arrive when the model is another one. From the first step on,
# top-k 10 % ends 9 to 22 % above f32, by seed.
. "$(dirname "$0")/script.sh"

prose

# train NAME ARGS...: writes the mean loss of the last 20 of its steps to $work/NAME.loss
train() {
    local name=$1
    shift
    "$TRAIN" configs/demo.cfg run.out="$work/$name" data.train="$work/t_train_*.bin" data.val= train.val_every=0 \
        train.sample_every=0 train.steps=200 train.batch=2 train.seq_len=64 train.global_batch=0 loop.ranks=4 \
        comm.transport=loop comm.ranks_per_node=2 comm.calibrate=no "$@" >"$work/$name.log" 2>&1 ||
        { fail "$name: exit $?"; tail -5 "$work/$name.log"; }
    grep -o '"loss":[^,]*' "$work/$name/log.jsonl" | cut -d: -f2 | tail -20 |
        awk '{ sum += $1 } END { if (NR == 20) printf "%.6f\n", sum / NR; else print "nan" }' >"$work/$name.loss"
    grep -o '"skipped":[0-9]*' "$work/$name/log.jsonl" | tail -1 | grep -qx '"skipped":0' ||
        fail "$name: skipped steps"
}
loss() { cat "$work/$1.loss"; }

# within NAME REFERENCE PERCENT: in either direction; NaN fails
within() {
    awk -v name="$1" -v a="$(loss "$1")" -v b="$(loss "$2")" -v bar="$3" 'BEGIN {
        d = 100 * (a / b - 1); ok = a > 0 && d <= bar && d >= -bar
        printf "  %-8s %s, f32 %s: %+.3f %% (bar %s)\n", name, a, b, d, bar; exit !ok }' ||
        fail "$1 is off by more than $3 %"
}

# worse NAME REFERENCE PERCENT: by at least so much
worse() {
    awk -v name="$1" -v a="$(loss "$1")" -v b="$(loss "$2")" -v bar="$3" 'BEGIN {
        d = 100 * (a / b - 1); ok = b > 0 && d >= bar
        printf "  %s %s, %s: %+.3f %% (at least %s)\n", name, a, b, d, bar; exit !ok }' ||
        fail "$1 is not visibly worse than $2"
}

echo "- every compressor with error feedback against f32"
train f32
train bf16 comm.compress=bf16 comm.warmup_steps=0
train int8 comm.compress=int8 comm.warmup_steps=0
train int4 comm.compress=int4 comm.warmup_steps=0
train topk10 comm.compress=topk comm.topk_density=0.1
awk -v a="$(loss f32)" 'BEGIN { exit !(a > 1 && a < 2.7) }' || fail "f32 learns nothing: $(loss f32)"
within bf16 f32 0.2
within int8 f32 0.2
within int4 f32 1
within topk10 f32 5

echo "- top-k 10 % from the first step on is worse, and says so"
train topk10.first comm.compress=topk comm.topk_density=0.1 comm.warmup_steps=0
worse topk10.first topk10 5
warned() { grep -q "^warning: comm.compress = topk from the first step on" "$work/$1.log"; }
warned topk10.first || fail "no warning"
warned topk10 && fail "a warning for the default"
grep -q "topk between nodes with error feedback from step 101 on" "$work/topk10.log" || fail "the header hides the warm-up"

# A value that top-k 1 % leaves behind comes some 100 steps later, all at once, and Adam's momentum stretches it over
# ten more: in only 100 compressed steps error feedback loses more by that than it gains (2.503 against 2.481 without).
# It wins within them without momentum, and with it in a longer run. On a smaller model, which learns faster: 2.2 to
# 2.6 % and 1.9 % over three seeds.
echo "- top-k 1 % is worse without error feedback"
topk1="comm.compress=topk comm.topk_density=0.01 model.layers=2 model.channels=64"
train topk1 $topk1 optim.beta1=0
train topk1.without $topk1 optim.beta1=0 comm.error_feedback=no
worse topk1.without topk1 1
train topk1.long $topk1 train.steps=600
train topk1.long.without $topk1 train.steps=600 comm.error_feedback=no
worse topk1.long.without topk1.long 1

finish
