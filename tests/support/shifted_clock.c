/*
 * Put in front of a process by LD_PRELOAD: its wall clock is off by what a file says, and that may change while it
 * runs. Its monotonic clock, and so every timer, is the machine's.
 *
 * libfaketime does the same and more, but not to a redis-server that uses jemalloc: it asks the loader for the real
 * functions, which allocates, which asks for the time. Here the kernel is asked, and nothing is allocated.
 *
 * The file, named by SHIFTED_CLOCK_FILE, holds one signed 64-bit number: nanoseconds to be added.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t none = 0;
static int64_t *shift_ns;

static int64_t shift(void) {
    int64_t *shared = __atomic_load_n(&shift_ns, __ATOMIC_ACQUIRE);
    if (!shared) {
        int kept = errno;
        const char *path = getenv("SHIFTED_CLOCK_FILE");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0)
            close(file);
        shared = page == MAP_FAILED ? &none : page;
        __atomic_store_n(&shift_ns, shared, __ATOMIC_RELEASE);
        errno = kept;
    }
    return __atomic_load_n(shared, __ATOMIC_RELAXED);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (syscall(SYS_clock_gettime, clock, now))
        return -1;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + shift();
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return (time_t)-1;
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}
