/* The two packings, as they are on disk:
 *
 *   Rdata.rdb   records, each: u32 (big-endian) unpacked size, zlib data of a serialised R object, 'X' '\n', ...
 *   ot.bzs      12 bytes per block, u32 little-endian: offset into ot.bzz, packed size, unpacked size
 *   ot.bzz      zlib data of each block: OSIS XML
 *
 * Sizes come from the files and are checked against what is there before anything is read or allocated. */
#define _POSIX_C_SOURCE 200809L
#include "data/extract.h"

#include "base/file.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

enum { UNPACKED_MAX = 1 << 28, PATH_SIZE = 1024 };
enum { R_VERSION_WITH_ENCODING = 3, R_STRING_VECTOR = 16, R_TYPE_MASK = 0xFF };

typedef struct Bytes {
    uint8_t *bytes; /* owned */
    size_t size;
} Bytes;

/* Unpacks zlib data of a known unpacked size; *used is the packed size. */
static Status unpack(const uint8_t *packed, size_t packed_size, size_t unpacked_size, const char *path, Bytes *out,
                     size_t *used) {
    *out = (Bytes){0};
    if (unpacked_size > UNPACKED_MAX)
        return bad_input("%s: expected blocks of at most %d bytes, found %zu", path, UNPACKED_MAX, unpacked_size);
    out->bytes = malloc(unpacked_size + 1);
    assert(out->bytes);
    z_stream stream = {.next_in = (Bytef *)(uintptr_t)packed, .avail_in = (uInt)packed_size, .next_out = out->bytes,
                       .avail_out = (uInt)unpacked_size + 1};
    int result = inflateInit(&stream);
    if (result == Z_OK)
        result = inflate(&stream, Z_FINISH);
    out->size = stream.total_out;
    *used = stream.total_in;
    inflateEnd(&stream);
    if (result == Z_STREAM_END && out->size == unpacked_size)
        return OK;
    free(out->bytes);
    *out = (Bytes){0};
    return bad_input("%s: expected zlib data of %zu bytes, found damaged data", path, unpacked_size);
}

static uint32_t big_endian(const uint8_t *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* ---- R ---- */

/* A cursor that ends the reading by standing at `size` when something is missing. */
typedef struct Reader {
    const uint8_t *bytes;
    size_t size, at;
    bool missing;
} Reader;

static const uint8_t *take(Reader *reader, size_t size) {
    if (reader->missing || reader->size - reader->at < size) {
        reader->missing = true;
        return NULL;
    }
    reader->at += size;
    return reader->bytes + reader->at - size;
}

static uint32_t take_u32(Reader *reader) {
    const uint8_t *bytes = take(reader, 4);
    return bytes ? big_endian(bytes) : 0;
}

/* Each string: u32 flags, i32 length (-1 is R's missing value), bytes. */
static void append_strings(Prose *prose, Reader *reader, uint32_t count) {
    for (uint32_t i = 0; i < count && !reader->missing; i++) {
        take_u32(reader);
        int32_t length = (int32_t)take_u32(reader);
        const uint8_t *text = take(reader, length > 0 ? (size_t)length : 0);
        if (text)
            prose_plain(prose, (const char *)text, length > 0 ? (size_t)length : 0);
        prose_plain(prose, "\n", 1);
    }
    prose_gap(prose, GAP_PARAGRAPH);
}

/* "X\n", version, two R versions, from version 3 on the encoding's name; then flags, whose low byte is the type. */
static Status append_object(Prose *prose, const Bytes *object, const char *path) {
    Reader reader = {.bytes = object->bytes, .size = object->size};
    const uint8_t *start = take(&reader, 2);
    if (!start || memcmp(start, "X\n", 2) != 0)
        return bad_input("%s: expected serialised R objects, found something else", path);
    uint32_t version = take_u32(&reader);
    take(&reader, 8);
    if (version >= R_VERSION_WITH_ENCODING)
        take(&reader, take_u32(&reader));
    if ((take_u32(&reader) & R_TYPE_MASK) == R_STRING_VECTOR)
        append_strings(prose, &reader, take_u32(&reader));
    return reader.missing ? bad_input("%s: expected a whole R object, found %zu bytes of one", path, object->size) : OK;
}

static Status append_records(Prose *prose, const FileMap *map, const char *path) {
    for (size_t at = 0, used; at < map->size; at += 4 + used) {
        Bytes object;
        if (map->size - at < 4)
            return bad_input("%s: expected whole records, found %zu bytes behind the last", path, map->size - at);
        TRY(unpack(map->bytes + at + 4, map->size - at - 4, big_endian(map->bytes + at), path, &object, &used));
        Status status = append_object(prose, &object, path);
        free(object.bytes);
        TRY(status);
    }
    return OK;
}

Status extract_rdb(Prose *prose, const char *path) {
    FileMap map;
    TRY(file_map(&map, path));
    Status status = append_records(prose, &map, path);
    file_unmap(&map);
    return status;
}

/* ---- SWORD ---- */

static uint32_t little_endian(const uint8_t *bytes) {
    return (uint32_t)bytes[3] << 24 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[1] << 8 | bytes[0];
}

static Status append_block(Prose *prose, const FileMap *data, const uint8_t *entry, const char *path) {
    uint32_t offset = little_endian(entry), packed = little_endian(entry + 4), unpacked = little_endian(entry + 8);
    if (packed == 0)
        return OK;
    if (offset > data->size || data->size - offset < packed)
        return bad_input("%s: expected a block of %u bytes at %u, found %zu bytes in the file", path, packed, offset,
                         data->size);
    Bytes block;
    size_t used;
    TRY(unpack(data->bytes + offset, packed, unpacked, path, &block, &used));
    prose_osis(prose, (const char *)block.bytes, block.size);
    prose_gap(prose, GAP_PARAGRAPH);
    free(block.bytes);
    return OK;
}

static Status append_blocks(Prose *prose, const FileMap *index, const FileMap *data, const char *path) {
    enum { ENTRY_BYTES = 12 };
    for (size_t at = 0; at + ENTRY_BYTES <= index->size; at += ENTRY_BYTES)
        TRY(append_block(prose, data, index->bytes + at, path));
    return OK;
}

Status extract_sword(Prose *prose, const char *index_path) {
    struct stat info;
    if (stat(index_path, &info) == 0 && info.st_size == 0)
        return OK;
    char data_path[PATH_SIZE];
    int length = snprintf(data_path, sizeof data_path, "%s", index_path);
    if (length < 1 || length >= (int)sizeof data_path)
        return bad_input("%s: the name is too long", index_path);
    data_path[length - 1] = 'z'; /* ot.bzs -> ot.bzz */
    FileMap index = {0}, data = {0};
    Status status = file_map(&index, index_path);
    if (status == OK)
        status = file_map(&data, data_path);
    if (status == OK)
        status = append_blocks(prose, &index, &data, data_path);
    file_unmap(&index);
    file_unmap(&data);
    return status;
}
