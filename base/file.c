#define _POSIX_C_SOURCE 200809L
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

Status file_map(FileMap *map, const char *path) {
    *map = (FileMap){0};
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* or a pipe would be waited for */
    if (file < 0)
        return bad_input("%s: cannot open: %s", path, strerror(errno));
    struct stat info;
    void *bytes = MAP_FAILED;
    Status status = OK;
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode))
        status = bad_input("%s: expected a regular file", path);
    else if (info.st_size == 0)
        status = bad_input("%s: the file is empty", path);
    else if ((bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, file, 0)) == MAP_FAILED)
        status = bad_input("%s: cannot map: %s", path, strerror(errno));
    close(file);
    TRY(status);
    *map = (FileMap){bytes, (size_t)info.st_size};
    return OK;
}

void file_unmap(FileMap *map) {
    if (map->bytes)
        munmap((void *)(uintptr_t)map->bytes, map->size);
    *map = (FileMap){0};
}

/* What the kernel cannot read it answers with SIGBUS, in the thread that asked: that comes back to where it asked, if
 * that was file_map_read, and else ends the process as ever. */
static _Thread_local sigjmp_buf *reading;

static void on_bus_error(int number) {
    if (reading)
        siglongjmp(*reading, 1);
    signal(number, SIG_DFL); /* comes again at once */
}

Status file_map_read(const FileMap *map, const char *path, size_t offset, void *to, size_t bytes) {
    sigjmp_buf here;
    struct sigaction action = {.sa_handler = on_bus_error, .sa_flags = SA_NODEFER};
    sigaction(SIGBUS, &action, NULL);
    bool failed = sigsetjmp(here, 0) != 0;
    if (!failed) {
        reading = &here;
        atomic_signal_fence(memory_order_seq_cst); /* the handler sees it before the first byte is read */
        memcpy(to, map->bytes + offset, bytes);
        atomic_signal_fence(memory_order_seq_cst);
    }
    reading = NULL;
    struct stat info = {0};
    if (failed && stat(path, &info) == 0 && (size_t)info.st_size < map->size)
        return bad_input("%s: expected %zu bytes as when it was opened, found %lld: it was cut while it was read", path,
                         map->size, (long long)info.st_size);
    return failed ? bad_input("%s: cannot read: the file has changed, or its disk fails", path) : OK;
}

Status folder_create(const char *path) {
    char partial[512];
    if (snprintf(partial, sizeof partial, "%s", path) >= (int)sizeof partial)
        return bad_input("%s: the name is too long", path);
    for (char *slash = partial + 1;; slash++) {
        slash += strcspn(slash, "/");
        char saved = *slash;
        *slash = 0;
        if (mkdir(partial, 0777) != 0 && errno != EEXIST)
            return bad_input("%s: cannot create folder: %s", partial, strerror(errno));
        if (!saved)
            break;
        *slash = saved;
    }
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode))
        return bad_input("%s: expected a folder, found a file", path);
    return OK;
}

Status folder_check_writable(const char *path) {
    char partial[512];
    if (snprintf(partial, sizeof partial, "%s", path) >= (int)sizeof partial)
        return bad_input("%s: the name is too long", path);
    char *existing = partial;
    while (access(existing, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR) && strcmp(existing, ".") &&
           strcmp(existing, "/"))
        existing = dirname(existing);
    struct stat info;
    if (stat(existing, &info) != 0)
        return bad_input("%s: cannot use folder: %s", path, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return bad_input("%s: expected a folder, but %s is a file", path, existing);
    char probe[544]; /* permission bits do not tell everything: read-only mounts, /proc, root */
    snprintf(probe, sizeof probe, "%s/.%ld.tmp", existing, (long)getpid());
    if (mkdir(probe, 0700) != 0)
        return bad_input("%s: folder is not writable: %s", path, strerror(errno));
    rmdir(probe);
    return OK;
}

Status atomic_open(AtomicFile *file, const char *path) {
    *file = (AtomicFile){0};
    if (snprintf(file->path, sizeof file->path, "%s", path) >= (int)sizeof file->path)
        return bad_input("%s: the name is too long", path);
    struct stat info; /* of a link itself: a rename would replace that */
    if (lstat(file->path, &info) == 0 && !S_ISREG(info.st_mode))
        return bad_input("%s: expected a regular file, or none, to write to", path);
    snprintf(file->temporary, sizeof file->temporary, "%s.%ld.tmp", file->path, (long)getpid());
    file->stream = fopen(file->temporary, "wb");
    if (!file->stream)
        return bad_input("%s: cannot write: %s", path, strerror(errno));
    return OK;
}

/* A rename lasts through a power cut once its folder is on disk. */
static void sync_folder_of(const char *path) {
    char copy[512];
    snprintf(copy, sizeof copy, "%s", path);
    int folder = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
        fsync(folder);
        close(folder);
    }
}

Status atomic_commit(AtomicFile *file) {
    errno = 0;
    bool written = fflush(file->stream) == 0 && !ferror(file->stream) && fsync(fileno(file->stream)) == 0;
    int error = errno;
    written = fclose(file->stream) == 0 && written;
    file->stream = NULL;
    if (!written || rename(file->temporary, file->path) != 0) {
        error = written || !error ? errno : error;
        unlink(file->temporary);
        return fault("%s: not written: %s", file->path, error ? strerror(error) : "write error");
    }
    sync_folder_of(file->path);
    return OK;
}

void atomic_discard(AtomicFile *file) {
    if (!file->stream)
        return;
    fclose(file->stream);
    file->stream = NULL;
    unlink(file->temporary);
}
