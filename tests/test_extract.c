/* data/prose.c and data/extract.c on small packings made here. */
#define _POSIX_C_SOURCE 200809L
#include "tests/folder.h"

#include "data/extract.h"
#include "data/prose.h"

#include <zlib.h>

static void assert_prose(Prose *prose, const char *expected) {
    if (prose->size != strlen(expected) || (prose->size && memcmp(prose->bytes, expected, prose->size) != 0))
        fail_msg("expected '%s', found '%.*s'", expected, (int)prose->size, prose->bytes ? prose->bytes : "");
    free(prose->bytes);
    *prose = (Prose){0};
}

static void check_osis(const char *markup, const char *expected) {
    Prose prose = {0};
    prose_osis(&prose, markup, strlen(markup));
    assert_prose(&prose, expected);
}

static void test_osis(void **state) {
    (void)state;
    check_osis("<w lemma=\"x\">In</w> <w>the</w>\n<hi>beginning</hi>", "In the beginning");
    check_osis("  <title>One</title> <div sID=\"a\"/>two<div eID=\"a\"/> <div/> three ", "One\n\ntwo\n\nthree");
    check_osis("<lg/><l>first</l> <l>second</l><lg/>prose", "first\nsecond\n\nprose");
    check_osis("mid<div type=\"x-milestone\" sID=\"p\"/>dle", "middle");
    check_osis("Christ,<note>1:1 <rdg>Messiah</rdg></note>the son<note>x</note>, of<note/>David",
               "Christ, the son, of David");
    check_osis("said<note>n</note>” he<note>m</note>—", "said” he—");
    check_osis("a &amp; b &lt;c&gt; &quot;d&apos; &#233;&#x4E2D; &nope; & &#0;e", "a & b <c> \"d' é中 &nope; & e");
    check_osis("one\u00A0two\u202Fthree\uFEFF\xc2\x97\r\n\x01 four", "one two three four");
    check_osis("<list><item>a</item><item>b</item></list><table><row><cell>c</cell><cell>d</cell></row></table>e",
               "a\nb\n\nc d\n\ne");
    check_osis("open < and <unclosed", "open < and <unclosed");
    check_osis("<note>never closed", "never closed");
    check_osis("&", "&");
    check_osis("<", "<");
    check_osis("<>", "");
    check_osis("", "");
}

static void test_plain(void **state) {
    (void)state;
    Prose prose = {0};
    static const char text[] = "\n\nCHAPTER I\r\n\n\n\n  It was\nlate. \n\tAnd dark.\n\n";
    prose_plain(&prose, text, strlen(text));
    assert_prose(&prose, "CHAPTER I\n\nIt was\nlate.\nAnd dark.");
    prose_plain(&prose, "cut \xe2\x82", 6); /* half a character at the end stays as it is */
    assert_prose(&prose, "cut \xe2\x82");
}

/* ---- packings ---- */

typedef struct Bytes {
    uint8_t bytes[4096];
    size_t size;
} Bytes;

static void put(Bytes *out, const void *bytes, size_t size) {
    assert_true(out->size + size <= sizeof out->bytes);
    memcpy(out->bytes + out->size, bytes, size);
    out->size += size;
}

static void put_u32(Bytes *out, uint32_t value, int big_endian) {
    uint8_t bytes[4];
    for (int i = 0; i < 4; i++)
        bytes[big_endian ? 3 - i : i] = (uint8_t)(value >> 8 * i);
    put(out, bytes, 4);
}

static void put_packed(Bytes *out, const void *bytes, size_t size) {
    uint8_t packed[4096];
    uLongf packed_size = sizeof packed;
    assert_int_equal(compress(packed, &packed_size, bytes, (uLong)size), Z_OK);
    put(out, packed, packed_size);
}

static void write_file(const char *name, const Bytes *content) {
    FILE *file = fopen(in_folder(name), "wb");
    assert_int_equal(fwrite(content->bytes, 1, content->size, file), content->size);
    fclose(file);
}

/* A record with a vector of strings; NULL ends the list, "NA" stands for R's missing string. */
static void put_record(Bytes *out, uint32_t version, const char *const *strings) {
    Bytes object = {0};
    uint32_t count = 0;
    while (strings[count])
        count++;
    put(&object, "X\n", 2);
    put_u32(&object, version, 1);
    put_u32(&object, 1, 1);
    put_u32(&object, 2, 1);
    if (version == 3) {
        put_u32(&object, 5, 1);
        put(&object, "UTF-8", 5);
    }
    put_u32(&object, 16, 1);
    put_u32(&object, count, 1);
    for (uint32_t i = 0; i < count; i++) {
        int missing = strcmp(strings[i], "NA") == 0;
        put_u32(&object, 0x40009, 1);
        put_u32(&object, missing ? UINT32_MAX : (uint32_t)strlen(strings[i]), 1);
        put(&object, strings[i], missing ? 0 : strlen(strings[i]));
    }
    put_u32(out, (uint32_t)object.size, 1);
    put_packed(out, object.bytes, object.size);
}

static void test_r_database(void **state) {
    (void)state;
    Bytes content = {0}, number = {0};
    put_record(&content, 3, (const char *const[]){"EMMA", "", "By Jane", "Austen", "NA", "£5", NULL});
    put(&number, "X\n\0\0\0\2\0\0\0\1\0\0\0\2\0\0\0\15\0\0\0\1\0\0\0\7", 26); /* an integer vector: passed over */
    put_u32(&content, (uint32_t)number.size, 1);
    put_packed(&content, number.bytes, number.size);
    put_record(&content, 2, (const char *const[]){"PERSUASION", NULL});
    write_file("a.rdb", &content);
    Prose prose = {0};
    assert_ok(extract_rdb(&prose, last_path));
    assert_prose(&prose, "EMMA\n\nBy Jane\nAusten\n\n£5\n\nPERSUASION");

    for (size_t cut = 1; cut < content.size; cut++) { /* cut short anywhere: refused, or whole records only */
        Bytes part = content;
        part.size = cut;
        write_file("cut.rdb", &part);
        if (extract_rdb(&prose, last_path) == OK)
            assert_true(cut > 50);
        else
            assert_non_null(strstr(error_line(), "cut.rdb: expected"));
        free(prose.bytes);
        prose = (Prose){0};
    }
    content.bytes[3]++;
    write_file("size.rdb", &content);
    assert_refused(extract_rdb(&prose, last_path), "size.rdb: expected zlib data of");
    free(prose.bytes);
}

static void test_sword_module(void **state) {
    (void)state;
    static const char *const blocks[] = {"<title>Genesis</title>In the beginning.<note>n</note>", "<p/>And then."};
    Bytes data = {0}, index = {0};
    for (int i = 0; i < 2; i++) {
        size_t before = data.size;
        put_packed(&data, blocks[i], strlen(blocks[i]));
        put_u32(&index, (uint32_t)before, 0);
        put_u32(&index, (uint32_t)(data.size - before), 0);
        put_u32(&index, (uint32_t)strlen(blocks[i]), 0);
        for (int k = 0; k < 3; k++) /* an empty block */
            put_u32(&index, 0, 0);
    }
    write_file("ot.bzz", &data);
    write_file("ot.bzs", &index);
    Prose prose = {0};
    assert_ok(extract_sword(&prose, last_path));
    assert_prose(&prose, "Genesis\n\nIn the beginning.\n\nAnd then.");

    index.bytes[4] = 200; /* the first block's packed size */
    write_file("ot.bzs", &index);
    assert_refused(extract_sword(&prose, last_path), "ot.bzz: expected a block of 200 bytes at 0, found");
    index.bytes[4] = 10;
    write_file("ot.bzs", &index);
    assert_refused(extract_sword(&prose, last_path), "ot.bzz: expected zlib data of");
    index.bytes[11] = 0xff; /* unpacked size of gigabytes */
    write_file("ot.bzs", &index);
    assert_refused(extract_sword(&prose, last_path), "ot.bzz: expected blocks of at most");
    index.size = 0;
    write_file("nt.bzs", &index);
    assert_ok(extract_sword(&prose, last_path));
    assert_int_equal(prose.size, 0);
    free(prose.bytes);
    assert_refused(extract_sword(&prose, in_folder("none.bzs")), "none.bzs");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_osis),
    cmocka_unit_test(test_plain),
    cmocka_unit_test(test_r_database),
    cmocka_unit_test(test_sword_module),
};

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, set_up, tear_down) ? 1 : 0;
}
