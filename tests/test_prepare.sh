#!/bin/bash
# build/tokenize and build/prepare end to end: shards against the text and against tokenize; pipes, many shards, older
# sets, interruption, a full disk; the one clear line for bad input.
. "$(dirname "$0")/script.sh"
prepare=$BUILD/prepare tokenize=$BUILD/tokenize

# tokens FILE: the tokens of a shard, one a line
tokens() { tail -c +1025 "$1" | od -An -v -t u2 -w2 | tr -d ' '; }
# text FILE [prepare's tokenizer]: the bytes of a shard without its end-of-text tokens
text() { tokens "$1" | grep -vx -e 50256 -e 256 | "$tokenize" --tokenizer "${2:-gpt2}" --decode; }
# refused TEXT COMMAND...: exit 2, nothing on stdout, one line on stderr that holds TEXT
refused() {
    local expected=$1
    shift
    "$@" >"$work/stdout" 2>"$work/stderr" </dev/null
    local code=$?
    [ $code = 2 ] || fail "expected exit 2, found $code: $*"
    [ "$(wc -l <"$work/stderr")" = 1 ] || { fail "expected one line: $*"; cat "$work/stderr"; }
    [ -s "$work/stdout" ] && fail "output for bad input: $*"
    grep -qF -- "$expected" "$work/stderr" || { fail "expected '$expected'"; cat "$work/stderr"; }
}

echo "- tokenize"
[ "$(printf 'Hello world' | "$tokenize")" = "15496 995" ] || fail "ids of Hello world"
[ "$(printf 'Hi' | "$tokenize" --tokenizer bytes)" = "72 105" ] || fail "bytes of Hi"
[ "$(printf '' | "$tokenize")" = "" ] || fail "ids of nothing"
[ "$(printf ' 15496\n995  ' | "$tokenize" --decode)" = "Hello world" ] || fail "decode"
head -c 200000 "$prepare" >"$work/binary"
for name in gpt2 bytes data/gpt2_tokenizer.bin; do
    "$tokenize" --tokenizer $name <"$work/binary" | "$tokenize" --tokenizer $name --decode | cmp - "$work/binary" ||
        fail "round trip, $name"
done
ids_refused() { # TEXT IDS
    printf '%s' "$2" >"$work/ids"
    refused "$1" sh -c "'$tokenize' --decode <'$work/ids'"
}
ids_refused "id 2: expected a number, found 'x'" "1 x"
ids_refused "id 1: expected a number, found '1.5'" "1.5"
printf '5 6\0 7' >"$work/ids"
refused "id 2: expected a number, found a NUL byte" sh -c "timeout 10 '$tokenize' --decode <'$work/ids'"
ids_refused "id 3: expected 0 to 50256, found 50257" "1 2 50257"
ids_refused "id 1: expected 0 to 50256, found -1" "-1"
ids_refused "id 1: expected 0 to 50256, found 99999999999999999999" "99999999999999999999"
refused "no_such_file" "$tokenize" --tokenizer "$work/no_such_file"
refused "README.md: expected a tokenizer file" "$tokenize" --tokenizer README.md

echo "- shards hold the text, and the ids of the whole of it"
# several windows long, words and white space of many kinds, one piece longer than a window
awk 'BEGIN { for (i = 0; i < 90000; i++) {
    printf "line %d of it\xe2\x80\x99s  na\xc3\xafve\t%s", i, i % 7 ? "and more" : "\xe6\x97\xa5\xe6\x9c\xac"
    printf " text%s", i % 3 ? "\n" : "   \n\n"
}}' >"$work/a.txt"
{ printf 'start\n'; head -c 2500000 /dev/zero | tr '\0' 'a'; printf '\nend\xff\n'; } >"$work/b.txt"
printf 'no line ends here but words do' >"$work/c.txt"
"$prepare" --out "$work/new/folder" --json t "$work"/[abc].txt >"$work/rows" || fail "prepare: exit $?"
mv "$work/new/folder" "$work/out"
[ "$(ls "$work/out" | tr '\n' ' ')" = "t_train_000000.bin t_val_000000.bin " ] || fail "files: $(ls "$work/out")"
: >"$work/expected_train"
for name in a b c; do
    # the held-out text starts at a line's start (c.txt: at a blank) and is about 2 % of the text
    tokens "$work/out/t_val_000000.bin" |
        awk -v want=$name 'BEGIN { split("a b c", names) } $1 == 50256 { d++; next } names[d] == want' |
        "$tokenize" --decode >"$work/val_$name"
    tail -c "$(wc -c <"$work/val_$name")" "$work/$name.txt" | cmp - "$work/val_$name" || fail "held-out of $name.txt"
    head -c -"$(wc -c <"$work/val_$name")" "$work/$name.txt" >"$work/train_$name"
    { echo 50256; "$tokenize" <"$work/train_$name" | tr ' ' '\n'; } >>"$work/expected_train"
done
tokens "$work/out/t_train_000000.bin" | cmp - "$work/expected_train" || fail "ids differ from those of the whole text"
[ "$(tail -c 1 "$work/train_a" | od -An -t x1)" = " 0a" ] || fail "the training text of a.txt does not end with a line"
share=$(($(wc -c <"$work/val_a") * 1000 / $(wc -c <"$work/a.txt")))
[ $share -ge 19 ] && [ $share -le 20 ] || fail "expected 2 % held out, found $share / 1000"
[ "$(cat "$work/val_c")" = " do" ] || fail "held-out text of c.txt: '$(cat "$work/val_c")'"
number='[0-9.]*'
row='{"split": "train", "shards": 1, "tokens": N, "text_bytes": N, "bytes_per_token": N, "mb_per_s": N}'
grep -qx "${row//N/$number}" "$work/rows" || fail "JSON: $(cat "$work/rows")"
[ "$(wc -l <"$work/rows")" = 3 ] || fail "expected three rows"

echo "- standard input and pipes are texts like others"
"$prepare" --out "$work/out" file "$work/a.txt" >/dev/null
cat "$work/a.txt" | "$prepare" --out "$work/out" pipe >/dev/null
"$prepare" --out "$work/out" dash - <"$work/a.txt" >/dev/null
"$prepare" --out "$work/out" fifo <(cat "$work/a.txt") >/dev/null
for name in pipe dash fifo; do
    for split in train val; do
        cmp "$work/out/${name}_${split}_000000.bin" "$work/out/file_${split}_000000.bin" || fail "$name, $split"
    done
done
[ "$(ls "$work/out" | wc -l)" = 10 ] || fail "unexpected files: $(ls "$work/out")"

echo "- many shards, and then fewer"
"$prepare" --out "$work/out" --tokenizer bytes --shard-tokens 1000000 --val 0.1 many "$work/a.txt" >/dev/null
cat "$work/out"/many_train_*.bin >/dev/null || fail "no shards"
for file in "$work/out"/many_train_*.bin; do tokens "$file"; done >"$work/many"
count=$(ls "$work/out"/many_train_*.bin | wc -l)
[ "$count" -ge 3 ] || fail "expected many shards"
[ "$(tokens "$work/out/many_train_000000.bin" | wc -l)" = 1000000 ] || fail "the first shard is not full"
"$prepare" --out "$work/out" --tokenizer bytes --val 0.1 many "$work/a.txt" >/dev/null
[ "$(ls "$work/out"/many_train_*.bin | wc -l)" = 1 ] || fail "shards of the older set are left"
tokens "$work/out/many_train_000000.bin" | cmp - "$work/many" || fail "shards do not add up"
for split in train val; do text "$work/out/many_${split}_000000.bin" bytes; done | cmp - "$work/a.txt" || fail "bytes"
"$prepare" --out "$work/out" --val 0 none "$work/a.txt" >/dev/null
"$prepare" --out "$work/out" --val 1 all "$work/a.txt" >/dev/null
[ "$(cd "$work/out" && echo none_* all_*)" = "none_train_000000.bin all_val_000000.bin" ] || fail "--val 0 and --val 1"
text "$work/out/all_val_000000.bin" | cmp - "$work/a.txt" || fail "--val 1 lost text"

echo "- what fails leaves nothing"
mkdir "$work/empty"
mkfifo "$work/slow"
"$prepare" --out "$work/empty" x "$work/a.txt" "$work/slow" >/dev/null 2>"$work/stderr" &
pid=$!
exec 9>"$work/slow" # opened once prepare has encoded a.txt and reads the pipe
kill -TERM $pid
wait $pid
code=$?
exec 9>&-
[ $code = 143 ] || fail "expected the exit of a signal, found $code"
grep -q interrupted "$work/stderr" || fail "not told: $(cat "$work/stderr")"
[ -z "$(ls -A "$work/empty")" ] || fail "left behind: $(ls -A "$work/empty")"
(trap '' XFSZ; ulimit -f 100; "$prepare" --out "$work/empty" x "$work/a.txt" >/dev/null 2>"$work/stderr")
[ $? = 1 ] && grep -q "x_train_000000.bin: not written" "$work/stderr" || fail "a full disk: $(cat "$work/stderr")"
[ -z "$(ls -A "$work/empty")" ] || fail "left behind: $(ls -A "$work/empty")"

echo "- what a killed program left is removed, and nothing else"
mkdir "$work/killed"
"$prepare" --out "$work/killed" x "$work/a.txt" "$work/slow" >/dev/null 2>&1 &
pid=$!
exec 9>"$work/slow"
kill -KILL $pid
wait $pid 2>/dev/null # quietly: the shell would tell that it was killed
exec 9>&-
[ "$(ls "$work/killed" | tr '\n' ' ')" = "x_train_000000.bin.$pid.tmp x_val_000000.bin.$pid.tmp " ] ||
    fail "expected temporary files: $(ls "$work/killed")"
mine=x_train_000001.bin.$$.tmp # this shell lives
others="xy_train_000000.bin.$pid.tmp x_test_000000.bin.$pid.tmp x_val_000000.bin.$pid.tmp2 y_x_val_000000.bin.$pid.tmp"
(cd "$work/killed" && touch $mine $others)
"$prepare" --out "$work/killed" x "$work/c.txt" >/dev/null || fail "prepare: exit $?"
[ "$(ls "$work/killed" | sort)" = "$(printf '%s\n' x_train_000000.bin x_val_000000.bin $mine $others | sort)" ] ||
    fail "after a killed run: $(ls "$work/killed")"

echo "- bad input"
: >"$work/nothing"
refused "missing.txt: cannot open" "$prepare" --out "$work/no" x "$work/a.txt" "$work/missing.txt"
refused "nothing: expected text, found an empty file" "$prepare" --out "$work/no" x "$work/nothing"
refused "expected a text file, found a folder" "$prepare" --out "$work/no" x "$work"
refused "standard input: expected text, found none" "$prepare" --out "$work/empty" x
refused "--out: expected a name of at most 255 bytes, found ''" "$prepare" --out= x "$work/a.txt"
refused "--tokenizer: expected a name" "$prepare" --tokenizer= --out "$work/no" x "$work/a.txt"
refused "expected NAME" "$prepare" --out "$work/no"
refused "found 'a/b'" "$prepare" --out "$work/no" a/b "$work/a.txt"
refused "no_such_file" "$prepare" --out "$work/no" --tokenizer "$work/no_such_file" x "$work/a.txt"
refused "/proc/tandem: folder is not writable" "$prepare" --out /proc/tandem x "$work/a.txt"
refused "expected a folder" "$prepare" --out "$work/a.txt" x "$work/a.txt"
refused "--val: expected a number in [0, 1], found '2'" "$prepare" --out "$work/no" --val 2 x "$work/a.txt"
[ ! -e "$work/no" ] && [ -z "$(ls -A "$work/empty")" ] || fail "bad input left something behind"

finish
