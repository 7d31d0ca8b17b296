/* The wall clock of a process, off by as many seconds as the file says that SHOAL_CLOCK names: 8 bytes, signed.
 *
 * Preloaded. libfaketime does the same with a lock and a second call for each look at the clock: a run has a quarter of
 * its speed under it, and fewer faults find anything under way. Waits until a moment of the wall clock are until the
 * same true moment; a moment of the monotonic clock is told from one of the wall clock by its size.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define FIRST_WALL_S 1000000000

static int (*true_gettime)(clockid_t, struct timespec *);
static int (*true_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*true_sem)(sem_t *, const struct timespec *);
static volatile const int64_t *shift_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHOAL_CLOCK");
    true_cond = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* the default is older, and another */
    if (!true_cond) true_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    true_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    true_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift_s = page;
    close(file);
}

static int64_t shift(void) { return shift_s ? *shift_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = true_gettime ? true_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    if (!failed) *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *into) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    if (into) *into = exact.tv_sec;
    return exact.tv_sec;
}

static struct timespec true_moment(const struct timespec *until) {
    struct timespec moment = *until;
    if (moment.tv_sec >= FIRST_WALL_S) moment.tv_sec -= shift();
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec moment = true_moment(until);
    return true_cond(condition, mutex, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec moment = true_moment(until);
    return true_sem(semaphore, &moment);
}
