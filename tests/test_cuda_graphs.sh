#!/bin/bash
# run.cuda_graphs on the emulated GPU: losses, parameters and what is sent are, to the bit, those of a run without, with
# micro-steps, validation between them, levels of recomputation, several ranks, shards, late streams. A graph that cannot be
# made or launched ends the run in one line.
. "$(dirname "$0")/script.sh"
tiny model.heads=2 model.channels=16 model.context=16 data.val="$work/t_val_*.bin" data.tokenizer=none train.seq_len=15 \
    train.batch=2 train.steps=4 train.val_every=2 train.val_batches=1 optim.warmup=1 run.device=cuda comm.verify_every=1
export CUDART_DEVICES=2
figures() { grep -o '"loss":[^,]*,\|"grad_norm":[^,]*,\|"val_loss":[^,}]*\|"bytes_[^,}]*' "$work/$1/log.jsonl"; }

# both NAME ARGS...: with graphs as without
both() {
    local name=$1
    shift
    train "$name" 1 loop "$@"
    train "$name-graphs" 1 loop "$@" run.cuda_graphs=yes
    cmp -s <(figures "$name") <(figures "$name-graphs") || fail "$name: other figures with graphs"
    same_model "$name" "$name-graphs"
    grep -q 'device .*, CUDA graphs$' "$work/$name-graphs.log" || fail "$name: the header does not tell of graphs"
}
two="loop.ranks=2 comm.ranks_per_node=1"
both f32
both micro train.global_batch=90 train.recompute=gelu
both bf16 train.dtype=bf16 train.global_batch=60 train.recompute=layers
both host $two comm.transport=loop train.recompute=norms
both nccl $two train.global_batch=120 comm.compress=int8 comm.warmup_steps=1
CUDART_LATE=1 EMULATOR_SEED=3 both late train.dtype=bf16 train.global_batch=60
CUDART_LATE=1 EMULATOR_SEED=4 both zero $two optim.zero=1 train.dtype=bf16 train.global_batch=120
CUDART_LATE=1 both zero-host $two optim.zero=1 comm.transport=loop
grep -q 'CUDA graphs' "$work/f32.log" && fail 'the header tells of graphs where there are none'

# refused EXIT LINE ARGS...
refused() {
    "$TRAIN" "$work/t.cfg" run.out="$work/refused" run.cuda_graphs=yes "${@:3}" >"$work/refused.log" 2>"$work/errors"
    [ $? = "$1" ] && [ "$(wc -l <"$work/errors")" = 1 ] && grep -q "$2" "$work/errors" ||
        fail "${*:3}: expected exit $1 and '$2'" "$work/errors"
    [ ! -e "$work/refused/model.bin" ] || fail "${*:3}: wrote a model"
}
refused 2 'run.cuda_graphs: expected no: they need a GPU, the device is: cpu' run.device=cpu
refused 2 'run.cuda_graphs: expected no: they need a GPU, the device is: replay' run.device=replay replay.forward_ms=1 replay.backward_ms=1
refused 2 'log.profile: times single operations' log.profile="$work/profile"
for call in cudaStreamBeginCapture:1 cudaStreamEndCapture:3 cudaGraphInstantiate:2 cudaGraphLaunch:9; do
    CUDART_FAIL=$call:2 refused 1 "^train: GPU 0, .*: CUDA graphs, which run.cuda_graphs=no does without: ${call%:*}: out of memory"
done
CUDART_FAIL=cudaGraphInstantiate@1:1:2 refused 1 '^train: rank 1: GPU 1, .*: CUDA graphs' $two
finish
