/* Preloaded into a server: let system calls on files below one folder fail or take long, as a shared page of memory says.
   TIDEMILL_FAULT_PAGE names the page's file, TIDEMILL_FAULT_ROOT the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, READ = 4, NAME = 8 };

struct page { int operations, error, percent, delay_ms; };

static volatile struct page *page;
static const char *root;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("TIDEMILL_FAULT_PAGE");
    int descriptor = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0) return;
    void *mapped = mmap(NULL, sizeof *page, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    root = getenv("TIDEMILL_FAULT_ROOT");
    if (mapped != MAP_FAILED && root) page = mapped;
}

static int is_below(const char *path) { return strncmp(path, root, strlen(root)) == 0; }

static int is_file_below(int descriptor) {
    char link[64], path[1024];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* Wait, then say whether the call fails, with errno set. */
static int fails(void) {
    if (rand() % 100 >= page->percent) return 0;
    if (page->delay_ms) usleep((useconds_t)page->delay_ms * 1000);
    errno = page->error;
    return page->error != 0;
}

#define CALL(result, name, operation, below, parameters, arguments)                       \
    result name parameters {                                                              \
        static result(*next) parameters;                                                  \
        if (!next) next = (result(*) parameters)dlsym(RTLD_NEXT, #name);                  \
        if (page && (page->operations & operation) && below && fails()) return -1;        \
        return next arguments;                                                            \
    }
#define ON_FILE(result, name, operation, parameters, arguments) \
    CALL(result, name, operation, is_file_below(descriptor), parameters, arguments)
#define ON_PATH(name, parameters, arguments) CALL(int, name, NAME, is_below(path), parameters, arguments)

ON_FILE(ssize_t, write, WRITE, (int descriptor, const void *data, size_t size), (descriptor, data, size))
ON_FILE(ssize_t, pwrite, WRITE, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at))
ON_FILE(ssize_t, pwrite64, WRITE, (int descriptor, const void *data, size_t size, off64_t at), (descriptor, data, size, at))
ON_FILE(int, ftruncate, WRITE, (int descriptor, off_t size), (descriptor, size))
ON_FILE(int, ftruncate64, WRITE, (int descriptor, off64_t size), (descriptor, size))
ON_FILE(ssize_t, read, READ, (int descriptor, void *data, size_t size), (descriptor, data, size))
ON_FILE(ssize_t, pread, READ, (int descriptor, void *data, size_t size, off_t at), (descriptor, data, size, at))
ON_FILE(ssize_t, pread64, READ, (int descriptor, void *data, size_t size, off64_t at), (descriptor, data, size, at))
ON_FILE(int, fsync, SYNC, (int descriptor), (descriptor))
ON_FILE(int, fdatasync, SYNC, (int descriptor), (descriptor))
ON_PATH(rename, (const char *path, const char *target), (path, target))
ON_PATH(unlink, (const char *path), (path))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))

#define OPEN(name)                                                                                       \
    int name(const char *path, int flags, ...) {                                                         \
        static int (*next)(const char *, int, ...);                                                      \
        va_list rest;                                                                                    \
        va_start(rest, flags);                                                                           \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                    \
        if (!next) next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);                      \
        int writes = flags & (O_WRONLY | O_RDWR | O_CREAT);                                              \
        if (page && writes && (page->operations & NAME) && is_below(path) && fails()) return -1;         \
        return next(path, flags, mode);                                                                  \
    }
OPEN(open)
OPEN(open64)
