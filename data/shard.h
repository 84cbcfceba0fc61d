/* Token shards in llm.c's formats: 256 int32 of header (magic, version, count), then uint16 or uint32 tokens.
 * See docs/formats.md. */
#ifndef DATA_SHARD_H
#define DATA_SHARD_H

#include "base/error.h"
#include "base/file.h"

#include <stdint.h>

typedef struct Shard {
    FileMap map;
    int64_t count; /* tokens */
    int token_bytes; /* 2 or 4 */
    char path[512];
} Shard;

Status shard_open(Shard *shard, const char *path);
void shard_close(Shard *shard); /* accepts a zeroed one */

static inline uint32_t shard_token(const Shard *shard, int64_t index) {
    const uint8_t *tokens = shard->map.bytes + 1024;
    return shard->token_bytes == 2 ? ((const uint16_t *)(const void *)tokens)[index]
                                   : ((const uint32_t *)(const void *)tokens)[index];
}

/* Streams one shard to disk, complete or absent. 16-bit tokens when vocab <= 65,536, else 32-bit. */
typedef struct ShardWriter {
    AtomicFile file;
    int64_t count;
    int token_bytes;
} ShardWriter;

Status shard_writer_open(ShardWriter *writer, const char *path, int vocab);
void shard_writer_add(ShardWriter *writer, const int32_t *ids, int64_t count);
Status shard_writer_close(ShardWriter *writer); /* writes the header and commits */

#endif
