#include "data/shard.h"

#include <assert.h>
#include <ctype.h>
#include <string.h>

typedef struct Format {
    int32_t magic, version;
    int token_bytes;
} Format;

static const Format formats[] = {{20240520, 1, 2}, {20240801, 7, 4}};
enum { FORMAT_COUNT = sizeof formats / sizeof formats[0], HEADER_WORDS = SHARD_HEADER_BYTES / 4 };

static const Format *format_of(int token_bytes) { return &formats[token_bytes == 4]; }

/* The first bytes as text, if that is what they are: tells the user at once that a text file was given. */
static const char *text_start(const FileMap *map, char *text, size_t size) {
    size_t n = map->size < size - 1 ? map->size : size - 1;
    memcpy(text, map->bytes, n);
    text[n] = 0;
    for (size_t i = 0; i < n; i++)
        if (!isprint((unsigned char)text[i]) && !isspace((unsigned char)text[i]))
            return "binary data";
    text[strcspn(text, "\r\n")] = 0;
    return text;
}

static Status check_header(Shard *shard, const int32_t *header) {
    const Format *format = NULL;
    for (int i = 0; i < FORMAT_COUNT; i++)
        if (header[0] == formats[i].magic)
            format = &formats[i];
    if (!format) {
        char text[17];
        return bad_input("%s: expected a token shard (magic %d or %d), found magic %d ('%s')", shard->path,
                         formats[0].magic, formats[1].magic, header[0], text_start(&shard->map, text, sizeof text));
    }
    if (header[1] != format->version)
        return bad_input("%s: expected version %d of token shards, found %d", shard->path, format->version, header[1]);
    int64_t expected = SHARD_HEADER_BYTES + (int64_t)header[2] * format->token_bytes;
    if (header[2] < 0 || expected != (int64_t)shard->map.size)
        return bad_input("%s: expected %lld bytes for the %d tokens of its header, found %zu bytes", shard->path,
                         (long long)expected, header[2], shard->map.size);
    shard->count = header[2];
    shard->token_bytes = format->token_bytes;
    return OK;
}

static Status check_file(Shard *shard) {
    if (shard->map.size < SHARD_HEADER_BYTES) {
        char text[17];
        return bad_input("%s: expected a token shard with a header of %d bytes, found %zu bytes ('%s')", shard->path,
                         SHARD_HEADER_BYTES, shard->map.size, text_start(&shard->map, text, sizeof text));
    }
    int32_t header[3];
    memcpy(header, shard->map.bytes, sizeof header);
    return check_header(shard, header);
}

Status shard_open(Shard *shard, const char *path) {
    *shard = (Shard){0};
    if (snprintf(shard->path, sizeof shard->path, "%s", path) >= (int)sizeof shard->path)
        return bad_input("%s: the name is too long", path);
    TRY(file_map(&shard->map, path));
    Status status = check_file(shard);
    if (status != OK)
        shard_close(shard);
    return status;
}

void shard_close(Shard *shard) {
    file_unmap(&shard->map);
    *shard = (Shard){0};
}

enum { CHUNK = 4096 }; /* tokens */

/* Widens raw tokens; returns how many are below `vocab` until one is not. */
static int64_t widen(const void *raw, int token_bytes, int64_t count, int vocab, int *ids) {
    const uint16_t *narrow = raw;
    const uint32_t *wide = raw;
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = token_bytes == 2 ? narrow[i] : wide[i];
        largest = token > largest ? token : largest;
        ids[i] = (int)token;
    }
    int64_t below = largest < (uint32_t)vocab ? count : 0;
    while (below < count && (uint32_t)ids[below] < (uint32_t)vocab)
        below++;
    return below;
}

Status shard_read(const Shard *shard, int64_t first, int64_t count, int vocab, int *ids) {
    uint32_t raw[CHUNK];
    size_t width = (size_t)shard->token_bytes;
    assert(first >= 0 && count >= 0 && first + count <= shard->count);
    for (int64_t done = 0; done < count; done += CHUNK) {
        int64_t n = count - done < CHUNK ? count - done : CHUNK, at = first + done;
        TRY(file_map_read(&shard->map, shard->path, SHARD_HEADER_BYTES + (size_t)at * width, raw, (size_t)n * width));
        int64_t below = widen(raw, shard->token_bytes, n, vocab, ids + done);
        if (below < n)
            return bad_input("%s: expected tokens below the vocabulary of %d, found %u at position %lld", shard->path,
                             vocab, (uint32_t)ids[done + below], (long long)(at + below));
    }
    return OK;
}

Status shard_writer_open(ShardWriter *writer, const char *path, int vocab) {
    *writer = (ShardWriter){.token_bytes = vocab <= 65536 ? 2 : 4};
    TRY(atomic_open(&writer->file, path));
    const int32_t header[HEADER_WORDS] = {0}; /* the count is known at the end */
    fwrite(header, sizeof header, 1, writer->file.stream);
    return OK;
}

void shard_writer_add(ShardWriter *writer, const int32_t *ids, int64_t count) {
    assert(count >= 0 && writer->count + count <= SHARD_TOKENS_MAX);
    uint16_t narrow[CHUNK];
    for (int64_t done = 0; done < count; done += CHUNK) {
        size_t n = (size_t)(count - done < CHUNK ? count - done : CHUNK);
        for (size_t i = 0; i < n && writer->token_bytes == 2; i++)
            narrow[i] = (uint16_t)ids[done + (int64_t)i];
        const void *source = writer->token_bytes == 2 ? (const void *)narrow : (const void *)(ids + done);
        fwrite(source, (size_t)writer->token_bytes, n, writer->file.stream);
    }
    writer->count += count;
}

Status shard_writer_close(ShardWriter *writer) {
    const Format *format = format_of(writer->token_bytes);
    const int32_t header[] = {format->magic, format->version, (int32_t)writer->count};
    if (fseek(writer->file.stream, 0, SEEK_SET) == 0)
        fwrite(header, sizeof header, 1, writer->file.stream);
    return atomic_commit(&writer->file);
}

void shard_writer_discard(ShardWriter *writer) { atomic_discard(&writer->file); }
