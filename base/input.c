#define _POSIX_C_SOURCE 200809L
#include "base/input.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

Status input_open(InputFile *input, const char *path) {
    *input = (InputFile){0};
    if (snprintf(input->path, sizeof input->path, "%s", path) >= (int)sizeof input->path)
        return bad_input("%s: the name is too long", path);
    struct stat info;
    if (stat(path, &info) != 0)
        return bad_input("%s: cannot open: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return bad_input("%s: expected a regular file", path);
    input->stream = fopen(path, "rbe");
    if (!input->stream)
        return bad_input("%s: cannot open: %s", path, strerror(errno));
    input->size = (int64_t)info.st_size;
    return OK;
}

void input_close(InputFile *input) {
    if (input->stream)
        fclose(input->stream);
    input->stream = NULL;
}

Status input_seek(InputFile *input, int64_t offset) {
    if (fseeko(input->stream, (off_t)offset, SEEK_SET) != 0)
        return bad_input("%s: cannot read at byte %lld: %s", input->path, (long long)offset, strerror(errno));
    return OK;
}

Status input_read(InputFile *input, void *data, size_t bytes) {
    if (bytes == 0 || fread(data, 1, bytes, input->stream) == bytes)
        return OK;
    if (ferror(input->stream))
        return bad_input("%s: cannot read: %s", input->path, strerror(errno));
    return bad_input("%s: the file ends inside a piece of %zu bytes", input->path, bytes);
}
