#!/bin/bash
# ./train with optim.zero and comm.compress on a tiny model and real text: the same bits with and without shards, memory
# and bytes by their formulas, exact resume, one clear line for what does not go together.
. "$(dirname "$0")/script.sh"
tiny model.channels=66 model.context=41 data.val="$work/t_val_*.bin" train.seq_len=31 train.batch=2 train.steps=12 \
    optim.lr=3e-3 optim.warmup=5 comm.verify_every=1 comm.bucket_bytes=64K

echo "- ZeRO-1 on and off, 1 to 5 ranks, odd sizes, T below the context: the same parameters, the same bytes"
for ranks in 1 2 3 4 5; do
    for algorithm in reduce_scatter hierarchical; do
        how=loop
        [ $ranks = 3 ] && how=mpi
        name=$algorithm.$ranks
        train $name.off $ranks $how comm.algorithm=$algorithm comm.verify_every=0 comm.split_embedding=no
        train $name.on $ranks $how comm.algorithm=$algorithm optim.zero=1 comm.verify_every=0 \
            comm.split_embedding=no
        same_model $name.on $name.off
        [ "$(values $name.on grad_norm)" = "$(values $name.off grad_norm)" ] || fail "$name: the norms differ"
        # the first step has nothing to gather yet
        [ "$(values $name.on bytes_intra | tail -n +2)" = "$(values $name.off bytes_intra | tail -n +2)" ] ||
            fail "$name: bytes differ"
    done
done
train 2x2.off 4 loop comm.ranks_per_node=2
train 2x2.on 4 mpi comm.ranks_per_node=2 optim.zero=1 train.save_every=6 train.val_every=6
same_model 2x2.on 2x2.off
moments() { sed -n 's/.*moments \([0-9.]*\),.*/\1/p' "$work/$1.log"; }
train big.off 4 loop model.channels=512 model.layers=4 train.steps=1 comm.algorithm=reduce_scatter
train big.on 4 loop model.channels=512 model.layers=4 train.steps=1 optim.zero=1
[ "$(moments big.off)" = 0.10 ] && [ "$(moments big.on)" = 0.03 ] || fail "moments $(moments big.off), $(moments big.on)"

echo "- the embedding in one or two gradients: the same losses"
train joined 4 loop comm.ranks_per_node=2 comm.split_embedding=no train.global_batch=744
train split 4 loop comm.ranks_per_node=2 train.global_batch=744
paste <(values joined loss) <(values split loss) |
    awk '{ d = $1 - $2; if (NF != 2 || !(d * d <= 1e-10 * $1 * $1)) exit 1 }' || fail "split_embedding changes the loss"

echo "- what waits for parameters is exposed communication and no part of forward: the parts of a step are its whole"
# parts NAME: each step of the log, and the closing table
parts() {
    paste <(values $1 step_ms) <(values $1 forward_ms) <(values $1 backward_ms) <(values $1 update_ms) \
        <(values $1 comm_exposed_ms) | awk 'NF != 5 || !($2 >= 0 && $3 >= 0 && $4 >= 0 && $5 >= 0) ||
            !($2 + $3 + $4 + $5 <= $1) { exit 1 }' && [ "$(values $1 step_ms | wc -l)" = 4 ] &&
        awk '$NF == "%" && /^  (forward|backward|comm exposed|update|other|total) / {
                ms = $(NF - 3); if ($1 == "total") total = ms; else { sum += ms; rows++ } if (!(ms >= 0)) bad = 1 }
            END { d = sum - total; exit bad || rows != 5 || !(d * d < 0.1) }' "$work/$1.log" ||
        fail "$1: the parts of a step" "$work/$1/log.jsonl" "$work/$1.log"
}
slow="run.device=replay replay.forward_ms=10 replay.backward_ms=20 train.steps=4 comm.ranks_per_node=2
    loop.gb_per_s_between=0.01 comm.verify_every=0 train.val_every=0"
for split in yes no; do
    train parts.$split 4 loop $slow optim.zero=1 comm.split_embedding=$split
    parts parts.$split
done
train parts.whole 4 loop $slow train.global_batch=744
parts parts.whole

echo "- compressed: the same bits with other buckets, overlap, processes; resume is exact, shards or not"
for compress in "bf16" "int8" "int4" "topk comm.topk_density=0.1" "int8 comm.compress_scope=all" "int8 optim.zero=1"; do
    set -- comm.compress=$compress comm.ranks_per_node=2 comm.warmup_steps=2 train.save_every=6 train.keep=3
    name=${compress//[ =]/-}
    train $name 4 loop "$@"
    train $name.other 4 mpi "$@" comm.bucket_bytes=1G comm.overlap=no
    same_model $name.other $name
    values $name compress_error | awk 'NR == 1 && $1 > 0 { print "FAIL: warm-up is compressed"; bad = 1 }
        NR == 12 && !($1 > 0 && $1 < 1) { print "FAIL: compress_error " $1; bad = 1 } END { exit bad }' || fail "$name"
    cp -r "$work/$name" "$work/$name.resumed"
    rm "$work/$name.resumed"/*_00000012.bin
    train $name.resumed 4 loop "$@" run.resume=yes
    same_model $name.resumed $name
    grep -q "since its checkpoint" "$work/$name.resumed.log" && fail "$name: something has changed"
done

echo "- resumed in another way: what changed, and what becomes of residuals"
# resumed NAME RANKS TEXT ARGS...: from int8's checkpoint of step 6
resumed() {
    local name=resumed.$1 ranks=$2 text=$3
    shift 3
    cp -r "$work/int8" "$work/$name"
    rm "$work/$name"/*_00000012.bin
    train "$name" "$ranks" loop comm.ranks_per_node=2 comm.compress=int8 train.steps=7 run.resume=yes "$@"
    grep -q "^warning: .*: since its checkpoint, $text" "$work/$name.log" ||
        { fail "$name: expected '$text'"; grep warning "$work/$name.log"; }
}
misfit="the residuals of error feedback do not fit, and start at zero$"
resumed int4 4 "comm.compress was int8, is int4; the residuals of error feedback are kept$" comm.compress=int4
resumed scope 4 "comm.compress_scope was between, is all; $misfit" comm.compress_scope=all
resumed zero 4 "optim.zero was 0, is 1; $misfit" optim.zero=1
resumed flat 4 "algorithm was hierarchical, is reduce_scatter; $misfit" comm.algorithm=reduce_scatter
resumed ranks 6 "ranks was 4, is 6; nodes was 2,2, is 3,3; $misfit" comm.ranks_per_node=3
resumed nodes 4 "algorithm was hierarchical, is reduce_scatter; nodes was 2,2, is 1,1,1,1; $misfit" comm.ranks_per_node=1
resumed others 4 "nodes was 2,2, is 1,3; $misfit" comm.ranks_per_node=1,3
resumed noef 4 "comm.error_feedback was yes, is no; the residuals of error feedback are dropped$" comm.error_feedback=no
resumed f32 4 "comm.compress was int8, is none; the residuals of error feedback are dropped$" comm.compress=none
resumed one 1 ".*ranks was 4, is 1; nodes was 2,2, is 1; the residuals of error feedback are dropped$"
train begun 4 loop comm.ranks_per_node=2 train.steps=6 train.save_every=6
train begun 4 loop comm.ranks_per_node=2 train.steps=7 run.resume=yes comm.compress=int8
grep -q "comm.compress was none, is int8; residuals of error feedback start at zero$" "$work/begun.log" || fail "begun"

echo "- a file of residuals of another step, node, run or plan, and one that is missing"
train seed 4 loop comm.ranks_per_node=2 comm.compress=int8 comm.warmup_steps=2 train.steps=6 train.save_every=6 run.seed=2
train plan 4 loop comm.ranks_per_node=2 comm.compress=int8 comm.warmup_steps=6 train.steps=6 train.save_every=6 \
    comm.compress_scope=all
# wrong TEXT FILE: residual_node1_00000006.bin is FILE; "" takes it away
wrong() {
    rm -rf "$work/wrong"
    cp -r "$work/int8" "$work/wrong"
    rm "$work/wrong"/*_00000012.bin "$work/wrong/residual_node1_00000006.bin"
    [ -z "$2" ] || cp "$work/$2" "$work/wrong/residual_node1_00000006.bin"
    ls -l --time-style=full-iso "$work/wrong" >"$work/before"
    "$TRAIN" "$work/t.cfg" run.out="$work/wrong" loop.ranks=4 comm.ranks_per_node=2 comm.compress=int8 run.resume=yes \
        >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && [ "$(grep -vc "^warning: " "$work/stderr")" = 1 ] && grep -q "^train: .*$1" "$work/stderr" ||
        fail "expected '$1', found '$(cat "$work/stderr")'"
    ls -l --time-style=full-iso "$work/wrong" | diff "$work/before" - || fail "$1: files have changed"
}
saved="wrong/residual_node1_00000006.bin: expected the residuals that were saved with this checkpoint, found"
wrong "$saved those of another step$" int8/residual_node1_00000012.bin
wrong "$saved another rank's or node's$" int8/residual_node0_00000006.bin
wrong "$saved another run's$" seed/residual_node1_00000006.bin
wrong "$saved those of another plan$" plan/residual_node1_00000006.bin
wrong "expected residual_node1_00000006.bin, which belongs to the checkpoint" ""

# Trap: Inf or NaN on one rank (DeepSpeed#753): all ranks skip that step, which changes nothing, and go on.
echo "- a NaN in one rank's gradient of step 4: the step is skipped whole"
# only_within A B FIRST COUNT: no byte differs outside COUNT ones from FIRST, counted from 1, and one inside does
only_within() {
    cmp -l "$1" "$2" | awk -v first="$3" -v count="$4" '
        $1 < first || $1 >= first + count { bad = 1 } END { exit bad || NR == 0 }' ||
        fail "a skipped step changes $(basename "$2")"
}
arrays() { od -An -tu4 -j12 -N4 "$1" | tr -d ' '; } # of a state file: each is named in 64 bytes (docs/formats.md)
for zero in 0 1; do
    name=skip.$zero
    train $name 4 loop comm.ranks_per_node=2 comm.compress=int8 comm.warmup_steps=1 optim.zero=$zero train.steps=6 \
        train.save_every=1 train.keep=9 loop.faults=nan:rank=2,step=4
    [ "$(values $name skipped | tr '\n' ' ')" = "0 0 0 1 1 1 " ] || fail "$name: skipped is $(values $name skipped)"
    [ "$(values $name grad_norm | grep -vc '^[0-9.e+-]*$')" = 1 ] && [ "$(values $name grad_norm | sed -n 4p)" = null ] ||
        fail "$name: grad_norm is $(values $name grad_norm)"
    values $name loss | awk '!($1 > 0) { exit 1 } END { exit NR != 6 }' || fail "$name: loss is $(values $name loss)"
    saved=$work/$name
    cmp "$saved/model_00000003.bin" "$saved/model_00000004.bin" || fail "$name: parameters of a skipped step"
    # step, position and skipped stand first, each with its checksum; adamw.step is not among them
    begin=$((16 + 64 * $(arrays "$saved/state_00000003.bin") + 8 + 1))
    only_within "$saved/state_00000003.bin" "$saved/state_00000004.bin" $begin 48
    for file in "$saved"/residual*_00000003.bin; do # name, 32 bytes and 8, stands before step
        only_within "$file" "${file%3.bin}4.bin" $((16 + 64 * $(arrays "$file") + 8 + 40 + 1)) 16
    done
    for node in "$saved/residual_node0_0000000" "$saved/residual_node1_0000000"; do
        [ "$(cmp -l "${node}4.bin" "${node}5.bin" | wc -l)" -gt 1000 ] || fail "$node stands still behind a skipped step"
    done
    cmp -s "$saved/model_00000004.bin" "$saved/model_00000005.bin" && fail "$name: the next step learns nothing"
done

echo "- bytes between 2 nodes of 4: flat ring 3.5 S, hierarchical 2 S in all, int8 25.4 % of that, top-k 1 % under 2 %"
# bytes NAME ARGUMENTS...: with what barriers and headers add. 1-D tensors, 0.2 % of this model, stay f32.
bytes() {
    train "$1" 8 loop comm.ranks_per_node=4 model.channels=512 train.steps=2 run.device=replay \
        replay.forward_ms=1 replay.backward_ms=1 comm.split_embedding=no comm.verify_every=0 comm.warmup_steps=0 "${@:2}"
    values "$1" bytes_inter | tail -1
}
parameters=$(((384 + 41) * 512 + 2 * (12 * 512 * 512 + 13 * 512) + 2 * 512)) # 257 rows, up to a multiple of 128
awk -v S=$((4 * parameters)) -v ring="$(bytes ring.bytes comm.algorithm=ring)" -v f32="$(bytes f32.bytes)" \
    -v int8="$(bytes int8.bytes comm.compress=int8)" -v topk="$(bytes topk.bytes comm.compress=topk)" 'BEGIN {
    print ring / S, f32 / S, int8 / f32, topk / f32
    exit !(ring >= 3.5 * S && ring < 3.505 * S && f32 >= 2 * S && f32 < 2.001 * S &&
        int8 / f32 > 0.2539 && int8 / f32 < 0.257 && topk / f32 > 0.01 && topk / f32 < 0.02) }' || fail "bytes between nodes"

echo "- nothing to compress: said so, and the same as f32"
train inside.f32 3 loop
train inside 3 loop comm.compress=int8 comm.warmup_steps=0
same_model inside inside.f32
grep -q "f32 (int8 is for between nodes, and there is one: nothing is compressed)" "$work/inside.log" || fail "one node"
train inside.topk 3 loop comm.compress=topk comm.compress_scope=all comm.warmup_steps=0
grep -q "topk everywhere with error feedback, " "$work/inside.topk.log" || fail "one node, every hop"

echo "- what does not go together"
refuse() { # TEXT ARGS...: exit 2 with that text, nothing written
    local text=$1
    shift
    "$TRAIN" "$work/t.cfg" run.out="$work/refused" loop.ranks=2 "$@" >"$work/stdout" 2>"$work/stderr"
    [ $? = 2 ] && grep -qF -- "$text" "$work/stderr" || { fail "expected '$text'"; cat "$work/stderr"; }
    [ "$(wc -l <"$work/stderr")" = 1 ] || fail "more than one line: $(cat "$work/stderr")"
}
refuse "comm.compress = int8: needs comm.algorithm = reduce_scatter or hierarchical" comm.compress=int8 comm.algorithm=tree
refuse "comm.requantise = ring" comm.compress=int8 comm.algorithm=ring
refuse "comm.requantise = ring: needs comm.compress" comm.requantise=ring comm.algorithm=ring
refuse "optim.zero = 1: needs comm.algorithm" optim.zero=1 comm.algorithm=ring
refuse "comm.topk_density: expected" comm.compress=topk comm.topk_density=0.9

finish
