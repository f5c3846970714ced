/* Faults of a file system, by LD_PRELOAD: the n-th operation that changes files below a folder fails, or kills the
   process. fault_arm() sets the folder, the number of the operation and the errno; fault_count() returns how many
   operations were seen since then. tests/hostile/faults.py compiles this file and calls both. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[4096];
static long count, fails_at, lasts, shift;
static int error; /* of the failing operation; 0: the process is killed instead */

void fault_arm(const char *below, long at, int number, int sticky) {
    strncpy(folder, below, sizeof folder - 1);
    count = 0, fails_at = at, error = number, lasts = sticky;
}

long fault_count(void) { return count; }

/* The clock on the wall jumps by so many seconds. */
void fault_shift(long seconds) { shift = seconds; }

static int fails(const char *path) {
    if (!folder[0] || strncmp(path, folder, strlen(folder))) return 0;
    long number = __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
    if (fails_at < 0 || number < fails_at || (number > fails_at && !lasts)) return 0;
    if (!error) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}

static int fails_at_file(int file) {
    char link[64], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

static int fails_below(int at, const char *path) {
    char link[64], full[8192];
    if (path[0] == '/') return fails(path);
    ssize_t length;
    if (at == AT_FDCWD) {
        if (!getcwd(full, 4096)) return 0;
        length = strlen(full);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        if ((length = readlink(link, full, 4095)) < 0) return 0;
    }
    snprintf(full + length, sizeof full - length, "/%s", path);
    return fails(full);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *data, size_t size) {
    if (fails_at_file(file)) {
        if (size > 1 && error) { /* a disk fills up in the middle of a write */
            int number = errno;
            if (REAL(write)(file, data, size / 2) < 0) return -1;
            errno = number;
        }
        return -1;
    }
    return REAL(write)(file, data, size);
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    return fails_at_file(file) ? -1 : REAL(writev)(file, parts, number);
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t at) {
    return fails_at_file(file) ? -1 : REAL(pwrite64)(file, data, size, at);
}
int fsync(int file) { return fails_at_file(file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails_at_file(file) ? -1 : REAL(fdatasync)(file); }
int ftruncate64(int file, off_t size) { return fails_at_file(file) ? -1 : REAL(ftruncate64)(file, size); }
int fchmod(int file, mode_t mode) { return fails_at_file(file) ? -1 : REAL(fchmod)(file, mode); }
int chmod(const char *path, mode_t mode) { return fails_below(AT_FDCWD, path) ? -1 : REAL(chmod)(path, mode); }
int mkdir(const char *path, mode_t mode) { return fails_below(AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return fails_below(AT_FDCWD, to) ? -1 : REAL(rename)(from, to); }
int renameat2(int at, const char *from, int under, const char *to, unsigned flags) {
    return fails_below(under, to) ? -1 : REAL(renameat2)(at, from, under, to, flags);
}

#define OPEN(name, parameters, arguments, at)                      \
    int name parameters {                                          \
        mode_t mode = 0;                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                       \
            va_list rest;                                          \
            va_start(rest, flags);                                 \
            mode = va_arg(rest, mode_t);                           \
            va_end(rest);                                          \
        }                                                          \
        int writes = flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC); \
        return writes && fails_below(at, path) ? -1 : REAL(name) arguments; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int under, const char *path, int flags, ...), (under, path, flags, mode), under)
OPEN(openat64, (int under, const char *path, int flags, ...), (under, path, flags, mode), under)

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += shift;
    return result;
}
