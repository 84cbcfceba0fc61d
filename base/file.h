/* Files: read-only maps, and writes that are complete or absent. */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Read-only memory map of a whole file. Missing, unreadable or empty: BAD_INPUT naming the file. */
typedef struct FileMap {
    const uint8_t *bytes;
    size_t size;
} FileMap;

Status file_map(FileMap *map, const char *path);
void file_unmap(FileMap *map); /* accepts a zeroed one */

/* Copies bytes of the map: for files that stay mapped for long. BAD_INPUT naming `path` when the file has become
 * shorter in the meantime, or cannot be read any more, where reading the map itself would end the process. */
Status file_map_read(const FileMap *map, const char *path, size_t offset, void *to, size_t bytes);

/* Makes the folder and those above it. Fails with BAD_INPUT naming it. */
Status folder_create(const char *path);

/* BAD_INPUT unless files could be made in the folder, which need not exist yet; leaves nothing behind. */
Status folder_check_writable(const char *path);

/* A new file that appears under `path` only when complete: written beside it under a temporary name, then flushed,
 * fsynced and renamed. Without commit the old file, if any, stays as it is.
 *     AtomicFile file; TRY(atomic_open(&file, path)); fwrite(..., file.stream); TRY(atomic_commit(&file)); */
typedef struct AtomicFile {
    FILE *stream; /* write here; errors may be ignored, commit checks them all */
    char path[512];
    char temporary[544];
} AtomicFile;

Status atomic_open(AtomicFile *file, const char *path);
Status atomic_commit(AtomicFile *file);   /* FAULT, with nothing changed under `path`, when anything was not written */
void atomic_discard(AtomicFile *file);    /* removes the temporary file; accepts a committed or zeroed one */

#endif
