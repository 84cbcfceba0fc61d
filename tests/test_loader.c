/* data/shard.c and data/loader.c: what ranks read, in any number, and what is refused. */
#define _POSIX_C_SOURCE 200809L
#include "tests/folder.h"

#include "data/loader.h"
#include "data/shard.h"

enum { VOCAB = 1000, T = 8 };

/* A shard of tokens first, first+1, ... */
static void make_shard(const char *name, int count, int first, int vocab) {
    ShardWriter writer;
    assert_ok(shard_writer_open(&writer, in_folder(name), vocab));
    for (int32_t i = 0, token; i < count; i++) {
        token = first + i;
        shard_writer_add(&writer, &token, 1);
    }
    assert_ok(shard_writer_close(&writer));
}

static LoaderOptions options_for(const char *glob) {
    return (LoaderOptions){.glob = glob, .seq_len = T, .vocab = VOCAB, .seed = 1, .hint = "make data"};
}

/* The set of formats.md that broke a resume elsewhere: 16 sequences, then 8. */
static Loader *open_small(bool shuffle, uint64_t seed) {
    char glob[128];
    make_shard("s_train_0.bin", 129, 0, VOCAB);
    make_shard("s_train_1.bin", 65, 500, VOCAB);
    snprintf(glob, sizeof glob, "%s/s_train_*.bin", folder);
    LoaderOptions options = options_for(glob);
    options.shuffle = shuffle;
    options.seed = seed;
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    return loader;
}

/* The first token of the sequence at a position; checks that the rest follows it. */
static int read_first(const Loader *loader, int64_t position) {
    int inputs[T], targets[T];
    assert_ok(loader_read(loader, position, 1, inputs, targets));
    for (int t = 0; t < T; t++) {
        assert_int_equal(inputs[t], inputs[0] + t);
        assert_int_equal(targets[t], inputs[t] + 1);
    }
    return inputs[0];
}

/* Number of the sequence in the small set that starts with that token. */
static int sequence_of(int first) { return first < 500 ? first / T : 16 + (first - 500) / T; }

static void test_small_shards(void **state) {
    (void)state;
    Loader *loader = open_small(false, 1);
    assert_int_equal(loader_shards(loader), 2);
    assert_int_equal(loader_tokens(loader), 129 + 65);
    assert_int_equal(loader_sequences(loader), 24);
    for (int p = 0; p < 72; p++)
        assert_int_equal(sequence_of(read_first(loader, p)), p % 24);
    assert_int_equal(read_first(loader, 15), 120);
    assert_int_equal(read_first(loader, 16), 500);
    loader_close(loader);
}

/* Batches of 4 over 1 to 3 ranks: together they read each sequence once per epoch, whatever the number of ranks. */
static void test_ranks_share_an_epoch(void **state) {
    (void)state;
    enum { B = 4 };
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        Loader *loader = open_small(shuffle, 3);
        for (int ranks = 1; ranks <= 3; ranks++) {
            int seen[24] = {0}, inputs[B * T], targets[B * T];
            for (int step = 0; step < 24 / (B * ranks); step++)
                for (int rank = 0; rank < ranks; rank++) {
                    assert_ok(loader_read(loader, (int64_t)(step * ranks + rank) * B, B, inputs, targets));
                    for (int b = 0; b < B; b++)
                        seen[sequence_of(inputs[b * T])]++;
                }
            for (int i = 0; i < 24; i++)
                assert_int_equal(seen[i], 1);
        }
        loader_close(loader);
    }
}

/* 4 ranks do not divide 24 / 4 batches: three epochs are read evenly all the same. */
static void test_ranks_cross_epochs(void **state) {
    (void)state;
    enum { B = 2, RANKS = 4 };
    Loader *loader = open_small(true, 5);
    int seen[24] = {0}, inputs[B * T], targets[B * T];
    for (int step = 0; step < 9; step++)
        for (int rank = 0; rank < RANKS; rank++) {
            assert_ok(loader_read(loader, (int64_t)(step * RANKS + rank) * B, B, inputs, targets));
            for (int b = 0; b < B; b++)
                seen[sequence_of(inputs[b * T])]++;
        }
    for (int i = 0; i < 24; i++)
        assert_int_equal(seen[i], 3);
    loader_close(loader);
}

/* Trap: uneven last batch (pytorch#33148, #38174): a set that ends amid a step's batches has none, because it begins
 * anew there. 3 sequences, 4 ranks of 2: each reads 2 whole ones in every step, the next 8 of 0 1 2 0 1 2 ... */
static void test_no_batch_is_uneven(void **state) {
    (void)state;
    enum { B = 2, RANKS = 4 };
    char glob[128];
    make_shard("short_train_0.bin", 3 * T + 1, 0, VOCAB);
    snprintf(glob, sizeof glob, "%s/short_train_*.bin", folder);
    LoaderOptions options = options_for(glob);
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    for (int step = 0; step < 5; step++)
        for (int rank = 0; rank < RANKS; rank++) {
            int inputs[B * T], targets[B * T], position = (step * RANKS + rank) * B;
            memset(inputs, 0xFF, sizeof inputs);
            assert_ok(loader_read(loader, position, B, inputs, targets));
            for (int i = 0; i < B * T; i++) {
                assert_int_equal(inputs[i], (position + i / T) % 3 * T + i % T);
                assert_int_equal(targets[i], inputs[i] + 1);
            }
        }
    loader_close(loader);
}

/* Any position gives what it gives on the way: seeking is asking. */
static void test_seek(void **state) {
    (void)state;
    Loader *loader = open_small(true, 9), *other = open_small(true, 9);
    int on_the_way[100];
    for (int p = 0; p < 100; p++)
        on_the_way[p] = read_first(loader, p);
    for (int i = 0; i < 100; i++)
        assert_int_equal(read_first(other, i * 37 % 100), on_the_way[i * 37 % 100]);
    loader_close(loader);
    loader_close(other);
}

static void test_shuffle_depends_on_seed_and_epoch(void **state) {
    (void)state;
    Loader *plain = open_small(true, 1), *same = open_small(true, 1), *other = open_small(true, 2);
    int epochs_differ = 0, seeds_differ = 0, in_order = 0;
    for (int p = 0; p < 24; p++) {
        assert_int_equal(read_first(plain, p), read_first(same, p));
        epochs_differ += read_first(plain, p) != read_first(plain, p + 24);
        seeds_differ += read_first(plain, p) != read_first(other, p);
        in_order += sequence_of(read_first(plain, p)) == p;
    }
    assert_true(epochs_differ > 12 && seeds_differ > 12 && in_order < 12);
    loader_close(plain);
    loader_close(same);
    loader_close(other);
}

/* Every n up to some, and one that is large: each sequence once per epoch, and it comes anywhere. */
static void test_every_size_is_permuted(void **state) {
    (void)state;
    char glob[128];
    for (int n = 1; n <= 5000; n = n < 70 ? n + 1 : n * 2 + 1) {
        make_shard("n.bin", n + 1, 0, 65536);
        snprintf(glob, sizeof glob, "%s/n.bin", folder);
        LoaderOptions options = {.glob = glob, .seq_len = 1, .vocab = 65536, .shuffle = true, .seed = (uint64_t)n};
        Loader *loader;
        assert_ok(loader_open(&loader, &options));
        assert_int_equal(loader_sequences(loader), n);
        for (int epoch = 0; epoch < 3; epoch++) {
            char *seen = calloc((size_t)n, 1);
            for (int p = 0; p < n; p++) {
                int input, target;
                assert_ok(loader_read(loader, (int64_t)epoch * n + p, 1, &input, &target));
                assert_true(input >= 0 && input < n && !seen[input]);
                assert_int_equal(target, input + 1);
                seen[input] = 1;
            }
            free(seen);
        }
        loader_close(loader);
    }
}

/* Where sequence 0 and its neighbour go over many epochs: uniform, and not together. */
static void test_shuffle_is_even(void **state) {
    (void)state;
    enum { N = 24, EPOCHS = 4800 };
    Loader *loader = open_small(true, 77);
    double counts[N] = {0}, chi2 = 0;
    int neighbours = 0;
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int order[N], place[N] = {0};
        for (int p = 0; p < N; p++) {
            order[p] = sequence_of(read_first(loader, (int64_t)epoch * N + p));
            place[order[p]] = p;
        }
        counts[place[0]]++;
        neighbours += place[1] == place[0] + 1;
    }
    for (int p = 0; p < N; p++)
        chi2 += (counts[p] - EPOCHS / N) * (counts[p] - EPOCHS / N) / (EPOCHS / N);
    assert_true(chi2 < 60); /* 23 degrees of freedom: chance of more is below 1e-4 */
    assert_close(neighbours, EPOCHS / N, 5 * sqrt(EPOCHS / N));
    loader_close(loader);
}

static void test_wide_tokens_and_short_shards(void **state) {
    (void)state;
    char globs[256];
    make_shard("w_a.bin", 17, 100000, 200000);
    make_shard("w_b.bin", 8, 0, 200000); /* one token short of a sequence */
    make_shard("w_c.bin", 0, 0, 200000);
    make_shard("w_d.bin", 9, 7, 65536);
    /* the second pattern brings w_a again, which counts once, and comes in front of the first by its name */
    snprintf(globs, sizeof globs, "%s/w_[b-d].bin  %s/w_[ab].bin", folder, folder);
    LoaderOptions options = options_for(globs);
    options.vocab = 200000;
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    assert_int_equal(loader_shards(loader), 4);
    assert_int_equal(loader_tokens(loader), 17 + 8 + 0 + 9);
    assert_int_equal(loader_sequences(loader), 3);
    assert_int_equal(read_first(loader, 0), 100000);
    assert_int_equal(read_first(loader, 1), 100008);
    assert_int_equal(read_first(loader, 2), 7);
    loader_close(loader);
}

static void test_header_is_llmc(void **state) {
    (void)state;
    make_shard("h.bin", 3, 258, 50257);
    FileMap map;
    assert_ok(file_map(&map, in_folder("h.bin")));
    assert_int_equal(map.size, 1024 + 6);
    int32_t header[256];
    memcpy(header, map.bytes, sizeof header);
    assert_int_equal(header[0], 20240520);
    assert_int_equal(header[1], 1);
    assert_int_equal(header[2], 3);
    for (int i = 3; i < 256; i++)
        assert_int_equal(header[i], 0);
    static const uint8_t tokens[] = {2, 1, 3, 1, 4, 1};
    assert_memory_equal(map.bytes + 1024, tokens, sizeof tokens);
    file_unmap(&map);
}

static void test_discard_leaves_nothing(void **state) {
    (void)state;
    ShardWriter writer;
    const int32_t token = 1;
    assert_ok(shard_writer_open(&writer, in_folder("gone.bin"), VOCAB));
    shard_writer_add(&writer, &token, 1);
    shard_writer_discard(&writer);
    char command[128];
    snprintf(command, sizeof command, "ls %s | grep -q gone", folder);
    assert_int_not_equal(system(command), 0);
    writer = (ShardWriter){0};
    shard_writer_discard(&writer);
}

/* A shard beyond 2 GiB, all holes but its last tokens: positions are 64-bit. */
static void test_large_shard(void **state) {
    (void)state;
    const int32_t count = 1200000000;
    int32_t header[256] = {20240520, 1, count};
    uint16_t tail[T + 1];
    for (int i = 0; i <= T; i++)
        tail[i] = (uint16_t)(600 + i);
    FILE *file = fopen(in_folder("large.bin"), "wb");
    assert_int_equal(fwrite(header, sizeof header, 1, file), 1);
    assert_int_equal(fseeko(file, 1024 + 2 * ((off_t)count - T - 1), SEEK_SET), 0);
    assert_int_equal(fwrite(tail, sizeof tail, 1, file), 1);
    fclose(file);
    LoaderOptions options = options_for(last_path);
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    int64_t n = ((int64_t)count - 1) / T;
    assert_int_equal(loader_sequences(loader), n);
    int inputs[T], targets[T];
    assert_ok(loader_read(loader, n - 1, 1, inputs, targets));
    int64_t start = (n - 1) * T, shift = start - (count - T - 1);
    assert_int_equal(targets[T - 1], 600 + shift + T);
    loader_close(loader);
    unlink(last_path);
}

/* ---- refusals ---- */

static Status try_open(const char *path, int vocab) {
    LoaderOptions options = options_for(path);
    options.vocab = vocab;
    Loader *loader;
    Status status = loader_open(&loader, &options);
    if (status == OK)
        loader_close(loader);
    else
        assert_null(loader);
    return status;
}

static void test_refused_files(void **state) {
    (void)state;
    char text[2000];
    memset(text, 'x', sizeof text);
    memcpy(text, "Once upon\na time", 16);
    make_file("text100", text, 100);
    assert_refused(try_open(last_path, VOCAB), "text100: expected a token shard");
    assert_non_null(strstr(error_line(), "found 100 bytes ('Once upon')"));
    make_file("text2000", text, 2000);
    assert_refused(try_open(last_path, VOCAB), "text2000: expected a token shard (magic 20240520 or 20240801), found");
    assert_refused(try_open("data/gpt2_tokenizer.bin", VOCAB), "found magic 20240328 ('binary data')");

    int32_t header[300] = {20240520, 2, 10};
    make_file("version.bin", header, 1024 + 20);
    assert_refused(try_open(last_path, VOCAB), "version.bin: expected version 1 of token shards, found 2");
    header[1] = 1;
    make_file("short.bin", header, 1024 + 18);
    assert_refused(try_open(last_path, VOCAB), "short.bin: expected 1044 bytes for the 10 tokens of its header");
    assert_non_null(strstr(error_line(), "found 1042 bytes"));
    make_file("long.bin", header, 1024 + 22);
    assert_refused(try_open(last_path, VOCAB), "found 1046 bytes");
    header[2] = -1;
    make_file("negative.bin", header, 1024 - 2);
    assert_refused(try_open(last_path, VOCAB), "negative.bin");
    make_file("negative.bin", header, 1024);
    assert_refused(try_open(last_path, VOCAB), "the -1 tokens");
    header[0] = 20240801;
    header[1] = 7;
    header[2] = 10;
    make_file("wide.bin", header, 1024 + 20);
    assert_refused(try_open(last_path, VOCAB), "expected 1064 bytes");
    make_file("empty.bin", header, 0);
    assert_refused(try_open(last_path, VOCAB), "empty.bin");
}

static void test_refused_patterns(void **state) {
    (void)state;
    char globs[300];
    assert_refused(try_open(in_folder("none_*.bin"), VOCAB), "none_*.bin: no file matches");
    assert_non_null(strstr(error_line(), "make data"));
    make_shard("here.bin", 100, 0, VOCAB);
    snprintf(globs, sizeof globs, "%s/here.bin %s/absent_*.bin", folder, folder);
    assert_refused(try_open(globs, VOCAB), "absent_*.bin: no file matches");
    assert_refused(try_open("", VOCAB), "expected a pattern of token shards, found ''");
    assert_refused(try_open("  ", VOCAB), "expected a pattern");
    make_shard("a b.bin", 100, 0, VOCAB);
    make_shard("a c.bin", 50, 0, VOCAB);
    snprintf(globs, sizeof globs, " %s/a\\ *.bin  %s/here.bin ", folder, folder);
    LoaderOptions options = options_for(globs);
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    assert_int_equal(loader_tokens(loader), 250);
    loader_close(loader);
    assert_refused(try_open("end\\", VOCAB), "no file matches");
    make_shard("tiny_0.bin", 8, 0, VOCAB);
    make_shard("tiny_1.bin", 5, 0, VOCAB);
    assert_refused(try_open(in_folder("tiny_*.bin"), VOCAB), "expected a shard of at least 9 tokens");
    assert_non_null(strstr(error_line(), "the longest of 2 has 8"));
}

static void test_refused_tokens(void **state) {
    (void)state;
    make_shard("t16.bin", 100, 0, VOCAB);
    assert_ok(try_open(last_path, 100));
    assert_refused(try_open(last_path, 99), "t16.bin: expected tokens below the vocabulary of 99, found 99 at");
    assert_non_null(strstr(error_line(), "position 99"));
    make_shard("t32.bin", 100, 69990, 100000);
    assert_refused(try_open(last_path, 70000), "t32.bin: expected tokens below the vocabulary of 70000, found 70000");
    assert_non_null(strstr(error_line(), "position 10"));
}

/* Sets too large to be checked at once are checked as they are read. */
static void test_refused_token_in_a_large_set(void **state) {
    (void)state;
    const int32_t count = 100000001;
    int32_t header[256] = {20240520, 1, count};
    const uint16_t token = VOCAB;
    const int64_t position = 3 * T + 2;
    FILE *file = fopen(in_folder("lazy.bin"), "wb");
    assert_int_equal(fwrite(header, sizeof header, 1, file), 1);
    assert_int_equal(ftruncate(fileno(file), 1024 + 2 * (off_t)count), 0);
    assert_int_equal(fseeko(file, 1024 + 2 * position, SEEK_SET), 0);
    assert_int_equal(fwrite(&token, sizeof token, 1, file), 1);
    fclose(file);
    LoaderOptions options = options_for(last_path);
    Loader *loader;
    assert_ok(loader_open(&loader, &options));
    int inputs[T], targets[T];
    assert_ok(loader_read(loader, 2, 1, inputs, targets));
    assert_refused(loader_read(loader, 3, 1, inputs, targets), "lazy.bin: expected tokens below the vocabulary of");
    assert_non_null(strstr(error_line(), "found 1000 at position 26"));
    loader_close(loader);
}

/* A file that is cut while it is mapped ends whoever reads the map by SIGBUS. */
static void test_shard_cut_while_it_is_read(void **state) {
    (void)state;
    make_shard("cut.bin", 20000, 0, 65536);
    LoaderOptions options = options_for(last_path);
    options.vocab = 65536;
    Loader *loader;
    int inputs[T], targets[T];
    assert_ok(loader_open(&loader, &options));
    assert_int_equal(truncate(last_path, 1024 + 2 * 8192), 0);
    assert_ok(loader_read(loader, 3, 1, inputs, targets));
    assert_int_equal(targets[T - 1], 4 * T);
    assert_refused(loader_read(loader, 2000, 1, inputs, targets),
                   "cut.bin: expected 41024 bytes as when it was opened, found 17408: it was cut while it was read");
    assert_ok(loader_read(loader, 3, 1, inputs, targets));
    assert_int_equal(unlink(last_path), 0);
    assert_refused(loader_read(loader, 2000, 1, inputs, targets), "cut.bin: cannot read");
    loader_close(loader);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_small_shards),
    cmocka_unit_test(test_ranks_share_an_epoch),
    cmocka_unit_test(test_ranks_cross_epochs),
    cmocka_unit_test(test_no_batch_is_uneven),
    cmocka_unit_test(test_seek),
    cmocka_unit_test(test_shuffle_depends_on_seed_and_epoch),
    cmocka_unit_test(test_every_size_is_permuted),
    cmocka_unit_test(test_shuffle_is_even),
    cmocka_unit_test(test_wide_tokens_and_short_shards),
    cmocka_unit_test(test_header_is_llmc),
    cmocka_unit_test(test_discard_leaves_nothing),
    cmocka_unit_test(test_large_shard),
    cmocka_unit_test(test_refused_files),
    cmocka_unit_test(test_refused_patterns),
    cmocka_unit_test(test_refused_tokens),
    cmocka_unit_test(test_refused_token_in_a_large_set),
    cmocka_unit_test(test_shard_cut_while_it_is_read),
};

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, set_up, tear_down) ? 1 : 0;
}
