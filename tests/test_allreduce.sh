#!/bin/bash
# build/allreduce: every algorithm is exact at small sizes, as threads and under mpirun; columns, JSON keys, flags and
# exit codes. Called by `make test` with BUILD and MPI set.
. "$(dirname "$0")/script.sh"
program=$BUILD/allreduce
collectives='naive ring tree reduce_scatter hierarchical leader'
keys='algorithm compress ranks nodes bytes time_us algbw_gb_per_s busbw_gb_per_s wrong predicted_us cpu_s_per_gb of_bound'

complain() { fail "$1" "$work/output" "$work/errors"; }

# start COMMAND...: at most a minute; sets code
start() {
    timeout 60 "$@" >"$work/output" 2>"$work/errors"
    code=$?
}

# expect_json ROWS RANKS NODES: so many rows, each with exactly the keys, and no wrong element
expect_json() {
    [ "$code" = 0 ] || complain "exit code $code"
    [ "$(wc -l <"$work/output")" = "$1" ] || complain "expected $1 rows"
    found=$(grep -oE '"[a-z_]+": ' "$work/output" | tr -d '": ' | paste -sd' ' | sed 's/ algorithm /\nalgorithm /g')
    [ "$(sort -u <<<"$found")" = "$keys" ] || complain "other keys than $keys"
    [ "$(grep -c "\"compress\": \"none\", \"ranks\": $2, \"nodes\": $3, .*\"wrong\": 0, " "$work/output")" = "$1" ] ||
        complain "ranks, nodes or wrong elements"
    # what MPI's own take no formula predicts, nor what they send; without link between nodes nothing has a bound
    local without='"algorithm": "\(iallreduce\|native\)"'
    [ "$3" = 1 ] || ! grep -q '"algorithm": "link"' "$work/output" && without=.
    ! sed '/"algorithm": "\(iallreduce\|native\)"/s/"predicted_us": null//
        '"/$without/"'s/"of_bound": null//' "$work/output" | grep -q null ||
        complain "a value is missing"
}

# algorithms of the rows, each once
algorithms() { sed 's/.*"algorithm": "\([a-z_]*\)".*/\1/' "$work/output" | sort -u | paste -sd' '; }
sorted() { printf '%s\n' "$@" | sort | paste -sd' '; }

for shape in '2 0 1' '3 1 3' '4 2 2' '5 3 2' '5 1,4 2'; do
    read -r ranks per_node nodes <<<"$shape"
    start "$program" --loop-ranks "$ranks" --ranks-per-node "$per_node" -b 8 -e 32K -f 64 -n 2 -w 1 -c 1 --json
    link=$([ "$nodes" = 1 ] || echo link)
    expect_json $((18 + 3 * ${#link} / 4)) "$ranks" "$nodes"
    # shellcheck disable=SC2086
    [ "$(algorithms)" = "$(sorted $collectives $link)" ] || complain "algorithms on $shape"
done

start "$program" --loop-ranks 2 -b 4K -e 4K -n 3 --algorithm tree,link
[ "$code" = 0 ] && [ ! -s "$work/errors" ] || complain "two algorithms by name: exit code $code"
grep -q '^# 2 ranks on 1 node, cores .*transport loop; inside a node .* GB/s; add .* GB/s, copy' "$work/output" ||
    complain "header"
columns='size \(B\) +count +algorithm +compress +ratio +time \(us\) +'
columns+='algbw \(GB/s\) +busbw \(GB/s\) +#wrong +predicted \(us\) +CPU s/GB +of bound'
grep -qE "^ *$columns" "$work/output" || complain "columns"
[ "$(grep -cE '^ *4096 +1024 +(tree|link) +none +1.00 .* 0 ' "$work/output")" = 2 ] || complain "rows"

start "$program" --loop-ranks 4 --ranks-per-node 2 --minbytes 64K --maxbytes 64K --iters 2 --algorithm link --json \
    loop.gb_per_s_between=1
expect_json 1 4 2
start "$program" --loop-ranks 4 --ranks-per-node 2 -b 8 -e 8 -n 2 --algorithm hierarchical --leader --json
expect_json 1 4 2
[ "$(algorithms)" = leader ] || complain "--leader"

# between nodes the bound is that of the bytes: 7/4 of link's for a ring of 2x4 ranks, 1 for hierarchical; bars
start "$program" --loop-ranks 8 --ranks-per-node 4 -b 512K -e 4M -f 8 -n 1 -w 0 --algorithm hierarchical,ring,link --json
awk -F '[:,]' '{ gsub(/["{} ]/, ""); bound = $12 * $24; if ($2 == "link") link[$10] = bound; else share[$2 " " $10] = bound }
    END { for (size = 524288; size <= 4194304; size *= 8) {
        ring = share["ring " size] / link[size]; hierarchical = share["hierarchical " size] / link[size]
        if (!(ring > 1.749 && ring < 1.751 && hierarchical > 0.999 && hierarchical < 1.001)) exit 1 } }' "$work/output" ||
    complain "of_bound"
[ "$(grep -cE '^# hierarchical and ring, of bound, .* \| [0-9.]+ \| (ok|MISSED)$' "$work/errors")" = 1 ] || complain "bars"
start "$program" --loop-ranks 2 --ranks-per-node 1 -b 16M -e 16M -n 1 -w 0 --compress int8 --algorithm hierarchical,link
grep -qE "^# f32's bound over .* at least 3\.3 \| [0-9.]+ \| (ok|MISSED)$" "$work/output" || complain "int8's bar"

# compressed between two nodes: within the format's bound; sizes that cut blocks
for compress in bf16 int8 int4 topk int8_tensor; do
    start "$program" --loop-ranks 5 --ranks-per-node 3 -b 4 -e 40012 -f 100 -n 2 -w 1 --json --compress $compress \
        --algorithm all
    [ "$code" = 0 ] && [ "$(grep -c '"wrong": 0,' "$work/output")" = 12 ] || complain "$compress: exit code $code"
    [ "$(grep -c "\"compress\": \"$compress\"" "$work/output")" = 9 ] || complain "$compress: rows that compress"
    ! grep -q null "$work/output" || complain "$compress: a value is missing"
    grep -qx '# left out, because they always send f32: naive, native, ring, tree' "$work/errors" ||
        complain "$compress: nothing says what is left out"
done
start "$program" --loop-ranks 2 -b 8K -e 8K -n 2 --compress int8 --compress-scope all --algorithm reduce_scatter
grep -qE ' int8 +3\.94 ' "$work/output" || complain '--compress-scope all'
start "$program" --loop-ranks 2 -b 64K -e 64K -n 2 --compress topk --density 0.1 --compress-scope all \
    --algorithm reduce_scatter
grep -qE ' topk +7\.[0-9]* ' "$work/output" || complain '--density'

# refuse LINE ARGUMENTS...: exit code 2 and that line
refuse() {
    local line=$1
    shift
    start "$program" "$@"
    [ "$code" = 2 ] && grep -q "^allreduce: .*$line" "$work/errors" || complain "$*: exit code $code"
}
refuse "no all-reduce is called 'rign'" --loop-ranks 2 --algorithm rign
refuse 'native: the loop transport has no all-reduce of its own' --loop-ranks 2 --algorithm native
refuse 'iallreduce: the loop transport has no all-reduce of its own' --loop-ranks 2 --algorithm iallreduce
refuse 'ranks_per_node = 3,2: expected 4 in all' --loop-ranks 4 --ranks-per-node 3,2
refuse 'needs two ranks' --algorithm link
refuse 'expected at most --maxbytes' -b 1M -e 1K
refuse "found '-z'" -z 3
refuse 'compress: expected' --compress int9
refuse '--compress int8: .* on one: expected --compress_scope all or --ranks_per_node$' --loop-ranks 2 --compress int8
refuse '--compress int8: ring always sends f32' --loop-ranks 2 --ranks-per-node 1 --compress int8 \
    --algorithm hierarchical,ring

# build/compressors: a row for each compressor and kind of data; what it does not know
start "$BUILD/compressors" --mib 1 --iters 1 --json
[ "$code" = 0 ] && [ "$(grep -c '"nmse": ' "$work/output")" = 14 ] || complain "compressors: exit code $code"
# and on the gradients of a run, where the errors have to be as small as the formats promise
tiny train.seq_len=32 train.batch=8 train.steps=5
start "$BUILD/compressors" --mib 1 --iters 1 --json --config "$work/t.cfg" --steps 1,5
row_keys='compressor data encode_gb_per_s decode_add_gb_per_s memcpy_gb_per_s ratio nmse '
[ "$code" = 0 ] && [ "$(grep -c '"data": "step [15]"' "$work/output")" = 14 ] &&
    [ "$(grep -oE '"[a-z_]+": ' "$work/output" | tr -d '":\n' | grep -oF "$row_keys" | wc -l)" = 28 ] ||
    complain "compressors --config: exit code $code"
# COMPRESSOR RATIO NMSE: at least and at most, in steps 1 and 5
while read -r name ratio nmse; do
    sed -n "s/.*\"compressor\": \"$name\", \"data\": \"step.*\"ratio\": \([^,]*\), \"nmse\": \([^,]*\),.*/\1 \2/p" "$work/output" |
        awk -v ratio="$ratio" -v nmse="$nmse" '$1 >= ratio && $2 > 0 && $2 <= nmse { good++ } END { exit good != 2 }' ||
        complain "compressors: $name on real gradients"
done <<<'bf16 2.0 4e-6
int8 3.9 5e-4
int4 7.5 6e-2'
for words in "-z|command line: expected section.key=value, found '-z'" "--zzz|unknown option '--zzz'; --help lists" \
    "model.layers=2|command line: model.layers=2: needs --config" "--config=none|none: cannot read" "--steps=5,x|--steps: expected rising numbers"; do
    start "$BUILD/compressors" "${words%%|*}"
    [ "$code" = 2 ] && [ ! -s "$work/output" ] && grep -qF "compressors: ${words#*|}" "$work/errors" ||
        complain "compressors $words"
done

if [ $MPI = 0 ]; then
    echo "mpirun: skipped: built without MPI"
else
    for shape in '2 0 1' '4 3,1 2'; do
        read -r ranks per_node nodes <<<"$shape"
        start mpirun --oversubscribe -n "$ranks" "$program" --ranks-per-node "$per_node" \
            -b 8 -e 32K -f 64 -n 2 -w 1 -c 1 --json
        link=$([ "$nodes" = 1 ] || echo link)
        expect_json $((24 + 3 * ${#link} / 4)) "$ranks" "$nodes"
        # shellcheck disable=SC2086
        [ "$(algorithms)" = "$(sorted native iallreduce $collectives $link)" ] || complain "algorithms under mpirun on $shape"
    done
    for name in allreduce overlap; do
        start mpirun --oversubscribe --mca btl ^tcp -n 2 "$BUILD/$name" --help # tcp may complain of the network
        [ "$code" = 0 ] && [ "$(grep -c "^usage: $name" "$work/output")" = 1 ] || complain "$name --help: exit code $code"
        [ ! -s "$work/errors" ] || complain "$name --help: complaints"
    done
    start mpirun --oversubscribe -n 4 "$program" --ranks-per-node 2 -b 64K -e 64K -n 2 --json --compress int8 --algorithm hierarchical
    grep -q '"compress": "int8", "ranks": 4, "nodes": 2, .*"wrong": 0,' "$work/output" || complain "int8: exit code $code"
    # an MPI whose all-reduces spoil one element of large arrays
    cat >"$work/spoil.c" <<'END'
#include <mpi.h>
int MPI_Allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    int code = PMPI_Allreduce(in, out, count, type, op, comm);
    if (type == MPI_FLOAT && count >= 1024)
        ((float *)out)[count / 2] += 1;
    return code;
}
int MPI_Iallreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request *all) {
    if (type == MPI_FLOAT && count >= 1024)
        ((float *)in)[count / 2] += 1;
    return PMPI_Iallreduce(in, out, count, type, op, comm, all);
}
END
    mpicc -shared -fPIC -o "$work/spoil.so" "$work/spoil.c" || complain "mpicc"
    start mpirun --oversubscribe -n 2 -x LD_PRELOAD="$work/spoil.so" "$program" -b 512 -e 8K -f 2 -n 3 -w 1 \
        --algorithm native,iallreduce,ring
    [ "$code" = 1 ] && grep -qx 'allreduce: 32 elements are wrong' "$work/errors" || complain "wrong: exit code $code"
    [ "$(grep -cE ' (native|iallreduce) .* 8 ' "$work/output")" = 4 ] || complain "wrong elements in the table" # 4 iterations, 2 ranks
    start mpirun --oversubscribe -n 2 "$program" --ranks-per-node 2,1
    [ "$code" = 2 ] && [ "$(grep -c '^allreduce: ' "$work/errors")" = 1 ] || complain "nodes of 2,1: exit code $code"
    start mpirun --oversubscribe -n 2 "$program" --algorithm rign
    [ "$code" = 2 ] && [ "$(grep -c '^allreduce: ' "$work/errors")" = 1 ] || complain "a wrong name: exit code $code"
fi

finish
