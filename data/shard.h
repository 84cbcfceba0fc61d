/* Token shards in llm.c's formats: 256 int32 of header (magic, version, count), then uint16 or uint32 tokens.
 * See docs/formats.md. */
#ifndef DATA_SHARD_H
#define DATA_SHARD_H

#include "base/error.h"
#include "base/file.h"

#include <stdint.h>

enum { SHARD_HEADER_BYTES = 1024 };

typedef struct Shard {
    FileMap map;
    int64_t count; /* tokens */
    int token_bytes; /* 2 or 4 */
    char path[512];
} Shard;

/* Maps a shard. Refused (BAD_INPUT, expected and found in the line): another magic or version, a count that does not
 * fit the file's size exactly. On failure nothing is left open. */
Status shard_open(Shard *shard, const char *path);
void shard_close(Shard *shard); /* accepts a zeroed one */

/* ids i32[count]: tokens first .. first+count-1. BAD_INPUT with file and position unless all are below `vocab`, and
 * when the file was cut since it was opened. */
Status shard_read(const Shard *shard, int64_t first, int64_t count, int vocab, int *ids);

/* Streams one shard to disk, complete or absent. 16-bit tokens when vocab <= 65,536, else 32-bit. */
typedef struct ShardWriter {
    AtomicFile file;
    int64_t count; /* tokens so far; at most SHARD_TOKENS_MAX */
    int token_bytes;
} ShardWriter;

#define SHARD_TOKENS_MAX INT32_MAX /* what the header's count can say */

Status shard_writer_open(ShardWriter *writer, const char *path, int vocab);
void shard_writer_add(ShardWriter *writer, const int32_t *ids, int64_t count);
Status shard_writer_close(ShardWriter *writer);   /* writes the header and commits */
void shard_writer_discard(ShardWriter *writer);   /* leaves nothing; accepts a closed or zeroed one */

#endif
