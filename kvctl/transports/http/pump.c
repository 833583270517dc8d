/* Reads of HTTP bodies without an interpreter. `kvctl.transports.http.compiled` is its only user, and says what for.
 *
 * A reading is one request on one connection. The thread that calls pump_poll waits for all connections and reads what
 * it finds; while there are several readings, helpers do the same beside it. No thread here ever touches a Python
 * object. A head that is in order, in the plainest way (`fits`), goes on with its body; any other is the caller's to judge
 * (HEAD_CAME).
 *
 * Who may touch a reading: whoever armed it gives it away, whoever gets its event owns it, and `end` gives it to the
 * caller of pump_poll. Only `moved` and `plain` are looked at by others.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FORM 3                      /* as in pump.py: changes with the functions and structures that it knows */

/* how a reading ended; `value` is what came of the body, FAILED's is the errno; CLOSED: before the body, CUT_OFF: in it */
enum { DONE = 0, CLOSED = 1, CUT_OFF = 2, HEAD_CAME = 3, HEAD_TOO_LARGE = 4, FAILED = 5 };

#define PEEK 1024                   /* a small first receive: what it takes of the body has to be copied */
#define HEAD_LIMIT 65536
#define AT_ONCE ((size_t)128 << 10) /* up to here a body is waited for as a whole */
#define BATCH ((size_t)1 << 20)     /* bytes that wake a reader of one body among several .. */
#define LONE ((size_t)8 << 20)      /* .. and of a lone one; the kernel takes less where its buffers end */
#define PIECE ((size_t)512 << 10)   /* bytes copied at once: then the caller may have better to do */
#define EVENTS 16
#define PATIENCE 20                 /* milliseconds after which a helper looks whether it is still needed */
#define MOST_VIEWS 1024             /* IOV_MAX */

struct reading {
    struct reading *next;           /* of those that have ended, or of the queue */
    struct reading *sibling;        /* of all */
    int fd, code, in_body;
    int low;                        /* SO_RCVLOWAT */
    int plain;                      /* be woken for any byte */
    uint64_t value, moved;
    double finished;
    size_t length, missing;
    struct iovec one, *views, *left;
    int count;                      /* of `left` */
    char *expected;                 /* the value of Content-Range, then that of ETag */
    size_t range, etag, room;       /* their bytes; 0: judge every head, any ETag will do */
    char *data;                     /* of the answer's head, as far as it came */
    size_t have, size;
};

struct ended { struct reading *reading; int64_t code; uint64_t value; double finished; };

struct pump {
    int epoll, wake, helpers, started, idle;
    int large;                      /* readings with a large body, begun and not ended: helpers are for them */
    int waiting;                    /* the caller is, and wants to be told */
    int inside;                     /* the caller is in a function below */
    int stop;
    pthread_mutex_t lock;
    pthread_cond_t work, left;
    struct reading *first, **last;  /* that have ended */
    struct reading *queue;          /* have something, and are nobody's */
    struct reading *all;
    pthread_t threads[];
};

void pump_free(struct pump *p) {
    while (p->all) {
        struct reading *r = p->all;
        p->all = r->sibling;
        free(r->views); free(r->expected); free(r->data); free(r);
    }
    if (p->epoll >= 0) close(p->epoll);
    if (p->wake >= 0) close(p->wake);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->left);
    free(p);
}

int pump_form(void) { return FORM; }

/* NULL, with errno: none could be made */
struct pump *pump_new(int helpers) {
    struct pump *p = calloc(1, sizeof *p + (size_t)helpers * sizeof(pthread_t));
    if (!p) return NULL;
    p->helpers = helpers;
    p->last = &p->first;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->left, NULL);
    p->epoll = epoll_create1(EPOLL_CLOEXEC);
    p->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (p->epoll < 0 || p->wake < 0 || epoll_ctl(p->epoll, EPOLL_CTL_ADD, p->wake, &event)) {
        int problem = errno;
        pump_free(p);
        errno = problem;
        return NULL;
    }
    return p;
}

struct reading *pump_reading(struct pump *p) {
    struct reading *r = calloc(1, sizeof *r);
    if (r) { r->sibling = p->all; p->all = r; }
    return r;
}

/* The functions that may touch a reading's memory belong to one thread, the caller; `pump_stop` waits for it to leave. */
static int enter(struct pump *p) {
    pthread_mutex_lock(&p->lock);
    int stopped = p->stop;
    p->inside = !stopped;
    pthread_mutex_unlock(&p->lock);
    return !stopped;
}

static void leave(struct pump *p) {
    pthread_mutex_lock(&p->lock);
    p->inside = 0;
    if (p->stop) pthread_cond_signal(&p->left);
    pthread_mutex_unlock(&p->lock);
}

static int is_large(const struct reading *r) { return r->length > AT_ONCE; }

static int is_alone(struct pump *p) { return __atomic_load_n(&p->large, __ATOMIC_RELAXED) < 2; }

static void tell(struct pump *p) {
    uint64_t one = 1;
    ssize_t ignored = write(p->wake, &one, sizeof one);
    (void)ignored;
}

static void end(struct pump *p, struct reading *r, int code, uint64_t value) {
    struct timespec t;
    if (r->low != 1) {
        int one = 1;
        r->low = 1;
        setsockopt(r->fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
    }
    clock_gettime(CLOCK_MONOTONIC, &t);
    r->code = code;
    r->value = value;
    r->finished = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
    r->next = NULL;
    pthread_mutex_lock(&p->lock);
    if (is_large(r)) __atomic_sub_fetch(&p->large, 1, __ATOMIC_RELAXED);
    __atomic_store_n(p->last, r, __ATOMIC_RELAXED);
    p->last = &r->next;
    if (p->waiting && !p->stop) tell(p);
    p->waiting = 0;
    pthread_mutex_unlock(&p->lock);
}

/* Gives the reading away. */
static void arm(struct pump *p, struct reading *r) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, .data.ptr = r};
    if (!epoll_ctl(p->epoll, EPOLL_CTL_MOD, r->fd, &event)) return;
    if (errno == ENOENT && !epoll_ctl(p->epoll, EPOLL_CTL_ADD, r->fd, &event)) return;
    end(p, r, FAILED, (uint64_t)errno);
}

/* How much has to be there to wake its reader. Of a lone body one half is copied while the other comes. */
static void low(struct pump *p, struct reading *r) {
    int value = 1;
    if (r->in_body && is_large(r) && !__atomic_load_n(&r->plain, __ATOMIC_RELAXED)) {
        size_t wanted = r->missing, most = is_alone(p) ? LONE : BATCH;
        if (is_alone(p) && wanted > r->length / 2) wanted /= 2;
        value = (int)(wanted < most ? wanted : most);
    }
    if (value != r->low) {
        r->low = value;
        setsockopt(r->fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
    }
}

static void wait_for(struct pump *p, struct reading *r) {
    low(p, r);
    arm(p, r);
}

static void forward(struct reading *r, size_t n) {
    r->missing -= n;
    while (r->count && n >= r->left->iov_len) {
        n -= r->left->iov_len;
        r->left++;
        r->count--;
    }
    if (n) {
        r->left->iov_base = (char *)r->left->iov_base + n;
        r->left->iov_len -= n;
    }
}

static void begin_body(struct reading *r, size_t head) {
    const char *rest = r->data + head;
    size_t n = r->have - head;
    while (n) {
        size_t part = n < r->left->iov_len ? n : r->left->iov_len;
        memcpy(r->left->iov_base, rest, part);
        rest += part;
        n -= part;
        forward(r, part);
    }
    r->in_body = 1;
}

static int is(const char *text, size_t size, const char *wanted, size_t wanted_size) {
    return size == wanted_size && !strncasecmp(text, wanted, size);
}

#define IS(text, size, literal) is(text, size, literal, sizeof literal - 1)

/* Whether the head of `size` bytes, with its empty line, is that of the range that was asked for, and the connection can
 * be used again. As strict as `kvctl.transports.wire.parse_head` and stricter than `http.ranges.check_read`: what is not
 * plain is not refused here, but judged there. */
static int fits(const struct reading *r, size_t size) {
    static const char name_bytes[] = "!#$%&'*+.^_`|~-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    static const char status[] = "HTTP/1.1 206";
    const char *line = r->data, *end = r->data + size - 2;
    int ranges = 0, lengths = 0, etags = 0;
    if (!r->range || memchr(line, 0, size)) return 0;
    for (int first = 1; line < end; first = 0) {
        const char *stop = memchr(line, '\r', (size_t)(end - line));
        if (!stop || stop[1] != '\n' || memchr(line, '\n', (size_t)(stop - line))) return 0;
        size_t length = (size_t)(stop - line);
        if (first) {
            if (length < sizeof status - 1 || memcmp(line, status, sizeof status - 1)) return 0;
            if (length > sizeof status - 1 && line[sizeof status - 1] != ' ') return 0;
            line = stop + 2;
            continue;
        }
        size_t name = strspn(line, name_bytes);
        if (!name || line[name] != ':') return 0;
        const char *value = line + name + 1, *tail = stop;
        while (value < tail && (*value == ' ' || *value == '\t')) value++;
        while (value < tail && (tail[-1] == ' ' || tail[-1] == '\t')) tail--;
        size_t got = (size_t)(tail - value);
        if (IS(line, name, "content-range")) {
            if (got != r->range || memcmp(value, r->expected, got)) return 0;
            ranges++;
        } else if (IS(line, name, "content-length")) {
            char wanted[24];
            int digits = snprintf(wanted, sizeof wanted, "%zu", r->length);
            if (got != (size_t)digits || memcmp(value, wanted, got)) return 0;
            lengths++;
        } else if (IS(line, name, "etag")) {
            if (r->etag && (got != r->etag || memcmp(value, r->expected + r->range, got))) return 0;
            etags++;
        } else if (IS(line, name, "transfer-encoding")) {
            return 0;
        } else if (IS(line, name, "connection") && !IS(value, got, "keep-alive")) {
            return 0;
        }
        line = stop + 2;
    }
    return ranges == 1 && lengths == 1 && etags <= 1 && (etags || !r->etag);
}

/* For tests: `fits` of a head that came whole. */
int pump_fits(char *data, size_t size, char *expected, size_t range, size_t etag, size_t length) {
    struct reading r = {.data = data, .expected = expected, .range = range, .etag = etag, .length = length};
    return fits(&r, size);
}

/* Whether the body is next; else it has been waited for, or has ended. */
static int take_head(struct pump *p, struct reading *r) {
    for (;;) {
        char *found = r->have >= 4 ? memmem(r->data, r->have, "\r\n\r\n", 4) : NULL;
        if (found) {
            size_t size = (size_t)(found - r->data) + 4;
            if (r->have - size > r->length || !fits(r, size)) {
                end(p, r, HEAD_CAME, 0);
                return 0;
            }
            begin_body(r, size);
            return 1;
        }
        if (r->have > HEAD_LIMIT) {
            end(p, r, HEAD_TOO_LARGE, 0);
            return 0;
        }
        if (r->size - r->have < PEEK) {
            char *more = realloc(r->data, r->size + 4 * PEEK);
            if (!more) {
                end(p, r, FAILED, ENOMEM);
                return 0;
            }
            r->data = more;
            r->size += 4 * PEEK;
        }
        ssize_t n = recv(r->fd, r->data + r->have, PEEK, MSG_DONTWAIT);
        if (n > 0) {
            r->have += (size_t)n;
            __atomic_add_fetch(&r->moved, (uint64_t)n, __ATOMIC_RELAXED);
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && errno == EAGAIN) {
            wait_for(p, r);
            return 0;
        } else {
            if (n < 0) end(p, r, FAILED, (uint64_t)errno);
            else end(p, r, CLOSED, 0);
            return 0;
        }
    }
}

static ssize_t receive(struct reading *r, size_t piece) {
    if (r->count == 1 || r->left->iov_len >= piece) {
        size_t most = r->left->iov_len < piece ? r->left->iov_len : piece;
        return recv(r->fd, r->left->iov_base, most, MSG_DONTWAIT);
    }
    struct msghdr message = {.msg_iov = r->left};
    for (size_t sum = 0; (int)message.msg_iovlen < r->count && message.msg_iovlen < MOST_VIEWS && sum < piece;)
        sum += r->left[message.msg_iovlen++].iov_len;
    return recvmsg(r->fd, &message, MSG_DONTWAIT);
}

/* Take what came. `caller`: it goes back as soon as something has ended, since the next request may depend on it. */
static void turn(struct pump *p, struct reading *r, int caller) {
    if (!r->in_body && !take_head(p, r)) return;
    while (r->missing) {
        int alone = is_alone(p);
        if (alone) low(p, r); /* also before it receives: the kernel opens the window that far */
        ssize_t n = receive(r, alone ? r->missing : PIECE);
        if (n > 0) {
            __atomic_add_fetch(&r->moved, (uint64_t)n, __ATOMIC_RELAXED);
            forward(r, (size_t)n);
            if (r->missing && caller && __atomic_load_n(&p->first, __ATOMIC_RELAXED)) {
                wait_for(p, r);
                return;
            }
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && errno == EAGAIN) {
            wait_for(p, r);
            return;
        } else {
            if (n < 0) end(p, r, FAILED, (uint64_t)errno);
            else end(p, r, CUT_OFF, r->length - r->missing);
            return;
        }
    }
    end(p, r, DONE, r->length);
}

static struct reading *from_queue(struct pump *p) {
    struct reading *r = p->queue;
    if (r) p->queue = r->next;
    return r;
}

static void *help(void *argument) {
    struct pump *p = argument;
    int needless = 0;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        struct reading *r = from_queue(p);
        if (!r && (p->large < 2 || needless)) {
            p->idle++;
            pthread_cond_wait(&p->work, &p->lock);
            p->idle--;
            needless = 0;
            continue;
        }
        pthread_mutex_unlock(&p->lock);
        if (!r) {
            struct epoll_event event;
            int n = epoll_wait(p->epoll, &event, 1, PATIENCE);
            r = n == 1 ? event.data.ptr : NULL;
            needless = n == 1 && !r; /* the caller is called, and woken as well */
        }
        if (r) turn(p, r, 0);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Under the lock: somebody else should read as well. */
static void call_helper(struct pump *p) {
    if (p->idle) {
        pthread_cond_signal(&p->work);
    } else if (p->started < p->helpers) {
        sigset_t all, before; /* signals are Python's, which handles them on its own threads */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        if (!pthread_create(&p->threads[p->started], NULL, help, p)) p->started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
}

static int prepare(struct reading *r, const char *range, size_t range_size, const char *etag, size_t etag_size,
                   const struct iovec *views, int count, char *place, size_t length) {
    free(r->views);
    r->views = NULL;
    r->one = (struct iovec){place, length};
    r->left = &r->one;
    r->count = 1;
    if (count) {
        r->left = r->views = malloc((size_t)count * sizeof *views);
        if (!r->views) return ENOMEM;
        memcpy(r->views, views, (size_t)count * sizeof *views);
        r->count = count;
    }
    r->range = range_size;
    r->etag = etag_size;
    if (range_size + etag_size > r->room) {
        char *more = realloc(r->expected, range_size + etag_size);
        if (!more) return ENOMEM;
        r->expected = more;
        r->room = range_size + etag_size;
    }
    if (!range_size) return 0;
    memcpy(r->expected, range, range_size);
    memcpy(r->expected + range_size, etag, etag_size);
    return 0;
}

static int is_stale(int fd) {
    char byte;
    return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

/* Send the request `head`, and read `length` bytes of its answer's body, to `place` or into `count` views. Returns 0, or
 * an errno when it was not begun; ESTALE: the connection was closed, or holds bytes that belong to no answer. `range` and
 * `etag`: see struct reading. */
int pump_start(struct pump *p, struct reading *r, int fd, const char *head, size_t head_size, const char *range,
               size_t range_size, const char *etag, size_t etag_size, const struct iovec *views, int count, char *place,
               size_t length, int plain) {
    if (!enter(p)) return ESHUTDOWN;
    int problem = is_stale(fd)
        ? ESTALE
        : prepare(r, range, range_size, etag, etag_size, views, count, place, length);
    r->fd = fd;
    r->in_body = 0;
    r->low = 1;
    r->plain = plain;
    r->length = r->missing = length;
    r->have = 0;
    r->moved = 0;
    while (!problem && head_size) {
        ssize_t n = send(fd, head, head_size, MSG_NOSIGNAL);
        if (n < 0) {
            problem = errno == EINTR ? 0 : errno;
        } else {
            head += n;
            head_size -= (size_t)n;
        }
    }
    if (!problem) {
        pthread_mutex_lock(&p->lock);
        if (is_large(r) && __atomic_add_fetch(&p->large, 1, __ATOMIC_RELAXED) > 1) call_helper(p);
        pthread_mutex_unlock(&p->lock);
        arm(p, r);
    }
    leave(p);
    return problem;
}

/* After HEAD_CAME. What came so far, the body's first bytes included. */
const char *pump_head(const struct reading *r, size_t *have) {
    *have = r->have;
    return r->data;
}

/* After HEAD_CAME: the first `size` bytes are dealt with; then comes the body, or else another head. */
int pump_go_on(struct pump *p, struct reading *r, size_t size, int body) {
    if (!enter(p)) return ESHUTDOWN;
    if (is_large(r)) __atomic_add_fetch(&p->large, 1, __ATOMIC_RELAXED);
    if (body) {
        begin_body(r, size);
    } else {
        r->have -= size;
        memmove(r->data, r->data + size, r->have);
    }
    turn(p, r, 1);
    leave(p);
    return 0;
}

/* Bytes that came on this reading so far. */
uint64_t pump_moved(const struct reading *r) { return __atomic_load_n(&r->moved, __ATOMIC_RELAXED); }

/* Nothing has moved for long: whether bytes wait there that are too few to wake anybody. They do from now on. */
int pump_look(struct reading *r) {
    int there = 0, low = 1, one = 1;
    socklen_t size = sizeof low;
    if (getsockopt(r->fd, SOL_SOCKET, SO_RCVLOWAT, &low, &size) || low <= 1) return 0;
    if (ioctl(r->fd, FIONREAD, &there) || there <= 0) return 0;
    __atomic_store_n(&r->plain, 1, __ATOMIC_RELAXED);
    setsockopt(r->fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
    return 1;
}

/* Make pump_poll return. */
void pump_wake(struct pump *p) {
    pthread_mutex_lock(&p->lock);
    if (!p->stop) tell(p);
    pthread_mutex_unlock(&p->lock);
}

/* Wait up to `timeout` milliseconds for something to come, take it; tell of up to `most` readings that have ended. */
int pump_poll(struct pump *p, int timeout, struct ended *out, int most) {
    int count = 0;
    if (!enter(p)) return 0;
    pthread_mutex_lock(&p->lock);
    struct reading *mine = p->first ? NULL : from_queue(p); /* that no helper has come to */
    p->waiting = !p->first && !mine;
    int wanted = p->waiting ? p->large > 1 ? 1 : EVENTS : 0;
    pthread_mutex_unlock(&p->lock);
    if (wanted) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(p->epoll, events, wanted, timeout);
        pthread_mutex_lock(&p->lock);
        p->waiting = 0;
        for (int i = 0; i < ready; i++) {
            struct reading *r = events[i].data.ptr;
            if (!r) {
                uint64_t ignored;
                ssize_t n = read(p->wake, &ignored, sizeof ignored);
                (void)n;
            } else if (!mine) {
                mine = r;
            } else {
                r->next = p->queue;
                p->queue = r;
            }
        }
        if (p->queue) call_helper(p);
        pthread_mutex_unlock(&p->lock);
    }
    while (mine) {
        turn(p, mine, 1);
        pthread_mutex_lock(&p->lock);
        mine = p->first && p->started ? NULL : from_queue(p);
        pthread_mutex_unlock(&p->lock);
    }
    pthread_mutex_lock(&p->lock);
    while (p->first && count < most) {
        struct reading *r = p->first;
        __atomic_store_n(&p->first, r->next, __ATOMIC_RELAXED);
        if (!p->first) p->last = &p->first;
        out[count++] = (struct ended){r, r->code, r->value, r->finished};
    }
    pthread_mutex_unlock(&p->lock);
    leave(p);
    return count;
}

/* Returns when no thread is at any reading any more; what has not ended never will. Not on the caller's own thread
 * while it is inside. Once. */
void pump_stop(struct pump *p) {
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    tell(p);
    pthread_cond_broadcast(&p->work);
    while (p->inside) pthread_cond_wait(&p->left, &p->lock);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->started; i++) pthread_join(p->threads[i], NULL);
    close(p->epoll);
    close(p->wake);
    p->epoll = p->wake = -1;
}
