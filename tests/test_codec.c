/* The codec: pieces of the flat gradient, their wire, residuals of error feedback that wait for the step to be
 * committed, and the error that is measured on the way. */
#include "tests/compress_cases.h"

#include "comm/compress/codec.h"

/* Matrices, 1-D groups, and a matrix too small to compress, none of them a multiple of a block. */
static void make_table(ParamTable *table) {
    *table = (ParamTable){0};
    param_add(table, "lnfw", -1, 1, 50);
    param_add(table, "fc", 1, 30, 41);
    param_add(table, "proj", 1, 7, 11);
    param_add(table, "b", 1, 1, 1301); /* long, but dense */
    param_add(table, "fc", 0, 3, 1367);
    param_add(table, "proj", 0, 2, 513);
    param_add(table, "b", 0, 1, 5);
    param_add(table, "wte", -1, 29, 151);
}

static Codec *make_codec(const Case *c, bool feedback) {
    ParamTable table;
    Codec *codec;
    make_table(&table);
    assert_ok(codec_create(&codec, &table, c->compressor, &c->options, false, feedback));
    param_table_free(&table);
    return codec;
}

static void test_pieces(void **state) {
    (void)state;
    static const bool dense[] = {true, false, true, true, false, false, true, false};
    Codec *codec = make_codec(&cases[2], false);
    int64_t at = 0;
    assert_int_equal(codec->piece_count, 8);
    for (int i = 0; i < 8; i++) {
        assert_true(codec->pieces[i].start == at && codec->pieces[i].dense == dense[i]);
        at = codec->pieces[i].stop;
    }
    assert_int_equal(at, codec->elems);
    codec_destroy(codec);
    codec_destroy(NULL);
}

/* wire_bytes against the pieces themselves, and the bound over every slice. */
static void test_wire_bytes(void **state) {
    (void)state;
    FOR_EACH_CASE(c) {
        Codec *codec = make_codec(c, false);
        for (int64_t elems = 0; elems <= codec->elems; elems += 1 + elems / 3) {
            size_t most = 0, max = codec_wire_bytes_max(codec, elems);
            for (int64_t offset = 0; offset + elems <= codec->elems; offset += 1 + (elems > 300 ? offset % 5 : 0)) {
                size_t bytes = codec_wire_bytes(codec, offset, elems), expected = 0;
                for (int i = 0; i < codec->piece_count; i++) {
                    const CodecPiece *piece = &codec->pieces[i];
                    int64_t start = piece->start > offset ? piece->start : offset;
                    int64_t stop = piece->stop < offset + elems ? piece->stop : offset + elems;
                    if (start < stop)
                        expected += piece->dense ? 4 * (size_t)(stop - start)
                                                 : c->compressor->wire_bytes(&c->options, start, stop - start);
                }
                assert_int_equal(bytes, expected);
                most = bytes > most ? bytes : most;
            }
            assert_true(most <= max);
        }
        codec_destroy(codec);
    }
}

/* Two steps over slices of any length: dense pieces exact, the others as their compressor does them alone. Trap:
 * residual keyed by bucket lost on rebuild: the second step's slices are others. */
static void test_slices(void **state) {
    (void)state;
    static const int64_t cuts[2][2] = {{700, 4096}, {2048, 333}};
    FOR_EACH_BLOCK_CASE(c) {
        Codec *codec = make_codec(c, true);
        int64_t elems = codec->elems;
        Encoded e = take_encoded(elems), alone = take_encoded(elems);
        for (int step = 0; step < 2; step++) {
            fill_student(e.values, elems, 20 + (uint64_t)step);
            for (int64_t i = 0, turn = 0, n; i < elems; i += n, turn++) {
                n = cuts[step][turn % 2] < elems - i ? cuts[step][turn % 2] : elems - i;
                n = i + n < elems ? (i + n + 4095) / 4096 * 4096 - i : n; /* as chunks are cut */
                n = i + n < elems ? n : elems - i;
                codec_encode(codec, HOP_SECOND, i, n, e.values + i, 0.5f, e.wire);
                codec_decode(codec, i, n, e.wire, e.decoded + i);
                for (int64_t j = i; j < i + n; j++)
                    e.residual[j] = 1;
                codec_decode_add(codec, i, n, e.wire, e.residual + i);
                for (int64_t j = i; j < i + n; j++)
                    assert_true(e.residual[j] == 1 + e.decoded[j]);
            }
            codec_commit(codec);
            for (int p = 0; p < codec->piece_count; p++) {
                int64_t at = codec->pieces[p].start, n = codec->pieces[p].stop - at;
                const Compressor *compressor = codec->pieces[p].dense ? &compressor_none : c->compressor;
                compressor->encode(&c->options, at, n, e.values + at, 0.5f, alone.residual + at, alone.residual + at,
                                   alone.wire);
                compressor->decode(&c->options, at, n, alone.wire, alone.decoded + at);
            }
            check_same(c, "decoded", e.decoded, alone.decoded, elems);
            if (codec->error_feedback)
                check_same(c, "residual", codec->residual[HOP_SECOND], alone.residual, elems);
        }
        give_encoded(&e), give_encoded(&alone);
        codec_destroy(codec);
    }
}

/* A step that is not committed changes nothing; hops do not share; what is forgotten reads as zeros. */
static void test_commit(void **state) {
    (void)state;
    Codec *codec = make_codec(&cases[3], true);
    int64_t elems = codec->elems;
    Encoded e = take_encoded(elems), again = take_encoded(elems);
    fill_gaussian(e.values, elems, 1);
    codec_encode(codec, HOP_FIRST, 0, elems, e.values, 1, e.wire);
    codec_commit(codec);
    memcpy(e.residual, codec->residual[HOP_FIRST], (size_t)elems * sizeof(float));
    codec_encode(codec, HOP_FIRST, 0, elems, e.values, 1, e.wire);
    codec_encode(codec, HOP_FIRST, 0, elems, e.values, 1, again.wire);
    assert_memory_equal(e.wire, again.wire, codec_wire_bytes(codec, 0, elems));
    assert_memory_equal(e.residual, codec->residual[HOP_FIRST], (size_t)elems * sizeof(float));
    codec_encode(codec, HOP_RESULT, 0, elems, e.values, 1, again.wire);
    assert_memory_not_equal(e.wire, again.wire, codec_wire_bytes(codec, 0, elems));
    codec_forget_new(codec);
    for (int64_t i = 0; i < elems; i++)
        assert_true(codec->new_residual[HOP_FIRST][i] == 0 && codec->new_residual[HOP_RESULT][i] == 0);
    assert_memory_equal(e.residual, codec->residual[HOP_FIRST], (size_t)elems * sizeof(float));
    give_encoded(&e), give_encoded(&again);
    codec_destroy(codec);
}

/* The sample's NMSE is near that of all values, with and without error feedback, and starts anew when read. */
static void test_measure(void **state) {
    (void)state;
    ParamTable table = {0};
    param_add(&table, "wte", -1, 1024, 1024);
    Encoded e = take_encoded(table.elems);
    fill_gaussian(e.values, table.elems, 9);
    for (int feedback = 0; feedback < 2; feedback++)
        FOR_EACH_CASE(c) {
            Codec *codec;
            double noise = 0, signal = 0;
            assert_ok(codec_create(&codec, &table, c->compressor, &c->options, false, feedback));
            assert_true(isnan(codec_measure(codec)));
            codec_encode(codec, HOP_FIRST, 0, table.elems, e.values, 1, e.wire);
            codec_decode(codec, 0, table.elems, e.wire, e.decoded);
            for (int64_t i = 0; i < table.elems; i++) {
                double lost = (double)e.values[i] - (double)e.decoded[i];
                noise += lost * lost;
                signal += (double)e.values[i] * (double)e.values[i];
            }
            assert_close(codec_measure(codec), noise / signal, 0.05 * noise / signal);
            assert_true(isnan(codec_measure(codec)));
            codec_destroy(codec);
        }
    give_encoded(&e);
    param_table_free(&table);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_pieces),
    cmocka_unit_test(test_wire_bytes),
    cmocka_unit_test(test_slices),
    cmocka_unit_test(test_commit),
    cmocka_unit_test(test_measure),
};

CHECK_MAIN(tests)
