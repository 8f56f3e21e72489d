/* Mock inference instances: `worker ROLE...` (mixed, prefill, decode) plays one instance per role, each at a free
 * loopback port, and prints the ports on one line. One process plays them all: on few cores, context switches between
 * several would be measured instead of the router.
 *
 * A GET is answered 200. A POST is answered with a fixed chat completion or, when its body says "stream": true, with
 * "max_tokens" events, each a write and an HTTP chunk of its own, then [DONE], then the chunk that ends the answer, in
 * a write of its own, as uvicorn does it. "seed" milliseconds lie between two events (the field stands in for one of
 * our own because every router passes it on). A prefill instance streams one event for every request.
 */
#include "common.h"

#include <signal.h>

#define CHAT_HEAD "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":"
#define CHAT_TAIL "\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":16,\"total_tokens\":32}"
#define CHOICE "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"An answer of about sixteen tokens, of which " \
               "nobody reads a single one.\"},\"finish_reason\":\"stop\"}],"
/* vllm-router copies these from the prefill instance's answer to the decode instance. */
#define KV_TRANSFER ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false," \
                    "\"remote_engine_id\":\"mock\",\"remote_block_ids\":[1],\"remote_host\":\"127.0.0.1\",\"remote_port\":1}"
#define MODELS "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"mock\"}]}"
#define INFO "{\"status\":\"ok\",\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"tp_size\":1,\"dp_size\":1}"
#define EVENT "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock\"," \
              "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n"
#define STREAM_HEAD "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
#define DONE_CHUNK "e\r\ndata: [DONE]\n\n\r\n"
#define LAST_CHUNK "0\r\n\r\n"
#define MOST_READY 256
#define READ_SIZE (256 << 10)

enum role { MIXED, PREFILL, DECODE };

struct connection {
    int fd;
    enum role role;
    bool writable_wanted;
    char *in, *out;
    size_t in_size, in_capacity, out_start, out_size, out_capacity;
    size_t body_start;   /* of the current request; 0 before its head is complete */
    size_t request_size; /* of the current request; 0 before it is known */
    int events_left;                 /* of a paced stream; it is in `paced` while more than 0 */
    int64_t due, pause;
    struct connection *next_paced;
};

struct listener {
    int fd;
    enum role role;
};

static int epoll;
static struct connection *paced;
static char event_chunk[512];
static size_t event_chunk_size;

/* Sends bytes, and buffers those that the socket does not accept now. */
static bool put(struct connection *c, const char *data, size_t size) {
    if (c->out_size == 0) {
        ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent > 0) data += sent, size -= sent;
    }
    if (size == 0) return true;
    c->out = grown(c->out, &c->out_capacity, c->out_start + c->out_size + size, 1);
    memcpy(c->out + c->out_start + c->out_size, data, size);
    c->out_size += size;
    if (!c->writable_wanted) {
        c->writable_wanted = true;
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &(struct epoll_event){EPOLLIN | EPOLLOUT, {.ptr = c}});
    }
    return true;
}

static bool put_kept(struct connection *c) {
    ssize_t sent = send(c->fd, c->out + c->out_start, c->out_size, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    c->out_start += sent;
    c->out_size -= sent;
    if (c->out_size == 0) {
        c->out_start = 0;
        c->writable_wanted = false;
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
    }
    return true;
}

static bool put_answer(struct connection *c, const char *body) {
    char answer[2048];
    int size = snprintf(answer, sizeof answer,
                        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body),
                        body);
    return put(c, answer, size);
}

static bool end_stream(struct connection *c) {
    return put(c, DONE_CHUNK, strlen(DONE_CHUNK)) && put(c, LAST_CHUNK, strlen(LAST_CHUNK));
}

static bool start_stream(struct connection *c, int events, int64_t pause) {
    if (!put(c, STREAM_HEAD, strlen(STREAM_HEAD))) return false;
    if (pause > 0) {
        c->events_left = events;
        c->pause = pause;
        c->due = now_ns() + pause;
        c->next_paced = paced;
        paced = c;
        return true;
    }
    for (int i = 0; i < events; i++)
        if (!put(c, event_chunk, event_chunk_size)) return false;
    return end_stream(c);
}

static void leave_paced(struct connection *c) {
    for (struct connection **p = &paced; *p; p = &(*p)->next_paced)
        if (*p == c) {
            *p = c->next_paced;
            return;
        }
}

/* Sends the events that are due; returns the time of the next event, or -1 if there is none. */
static int64_t send_due(void) {
    int64_t next = -1, now = now_ns();
    for (struct connection *c = paced, *following; c; c = following) {
        following = c->next_paced;
        while (c->events_left > 0 && c->due <= now) {
            put(c, event_chunk, event_chunk_size); /* the next read detects a lost connection */
            c->due += c->pause;
            if (--c->events_left == 0) {
                leave_paced(c);
                end_stream(c);
            }
        }
        if (c->events_left > 0 && (next < 0 || c->due < next)) next = c->due;
    }
    return next;
}

/* Returns the text after `"name":` and blanks in a JSON text, or NULL. */
static const char *value_of(const char *json, size_t size, const char *name) {
    char quoted[40];
    int quoted_size = snprintf(quoted, sizeof quoted, "\"%s\"", name);
    const char *at = memmem(json, size, quoted, quoted_size);
    if (!at) return NULL;
    at += quoted_size;
    return at + strspn(at, ": ");
}

static long number_of(const char *json, size_t size, const char *name, long otherwise) {
    const char *value = value_of(json, size, name);
    return value ? strtol(value, NULL, 10) : otherwise;
}

static bool answer_post(struct connection *c, const char *body, size_t size) {
    const char *stream = value_of(body, size, "stream");
    if (!stream || strncmp(stream, "true", 4) != 0)
        return put_answer(c, c->role == PREFILL ? CHAT_HEAD CHOICE CHAT_TAIL KV_TRANSFER "}" : CHAT_HEAD CHOICE CHAT_TAIL "}");
    long events = number_of(body, size, "max_tokens", number_of(body, size, "max_completion_tokens", 1));
    return start_stream(c, c->role == PREFILL ? 1 : events, number_of(body, size, "seed", 0) * NS_PER_MS);
}

/* Finds the request's head after it has arrived, and in it the request's size. */
static void read_head(struct connection *c) {
    char *end = memmem(c->in, c->in_size, "\r\n\r\n", 4);
    if (!end) return;
    *end = 0; /* for strcasestr; the head is not read again */
    c->body_start = end + 4 - c->in;
    if (strcasestr(c->in, "\r\ntransfer-encoding:")) return; /* read_chunks finds the size */
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    c->request_size = c->body_start + (length ? strtoul(length + 17, NULL, 10) : 0);
}

/* Returns the data of the chunk at `at`, its size and its end; NULL if it is not complete before `limit`. */
static char *chunk_at(char *at, char *limit, size_t *size, char **following) {
    char *line_end = memmem(at, limit - at, "\r\n", 2);
    if (!line_end) return NULL;
    char *data = line_end + 2;
    *size = strtoul(at, NULL, 16);
    if ((size_t)(limit - data) < *size + 2) return NULL;
    *following = data + *size + 2;
    return data;
}

/* Joins a body of chunks after the last of them has arrived (an empty one, without trailers). */
static void read_chunks(struct connection *c) {
    char *limit = c->in + c->in_size, *at = c->in + c->body_start, *data;
    size_t size = 1;
    while (size > 0)
        if (!chunk_at(at, limit, &size, &at)) return;
    char *body = c->in + c->body_start, *chunk = body;
    while (data = chunk_at(chunk, limit, &size, &chunk), size > 0) {
        memmove(body, data, size);
        body += size;
    }
    memmove(body, at, limit - at);
    c->request_size = body - c->in;
    c->in_size = c->request_size + (limit - at);
}

/* Answers every complete request. */
static bool answer(struct connection *c) {
    while (c->in_size > 0) {
        if (c->body_start == 0) read_head(c);
        if (c->body_start && c->request_size == 0) read_chunks(c);
        if (c->request_size == 0 || c->in_size < c->request_size) return true;
        c->in = grown(c->in, &c->in_capacity, c->request_size + 1, 1);
        char following = c->in[c->request_size];
        c->in[c->request_size] = 0; /* the end for functions that read numbers and text */
        bool sent;
        if (strncmp(c->in, "POST ", 5) == 0)
            sent = answer_post(c, c->in + c->body_start, c->request_size - c->body_start);
        else
            sent = put_answer(c, strstr(c->in, " /v1/models") ? MODELS : INFO);
        if (!sent) return false;
        c->in[c->request_size] = following;
        c->in_size -= c->request_size;
        memmove(c->in, c->in + c->request_size, c->in_size);
        c->body_start = c->request_size = 0;
    }
    return true;
}

static bool receive(struct connection *c) {
    c->in = grown(c->in, &c->in_capacity, c->in_size + READ_SIZE, 1);
    ssize_t size = recv(c->fd, c->in + c->in_size, READ_SIZE, 0);
    if (size <= 0) return size < 0 && errno == EAGAIN;
    c->in_size += size;
    return answer(c);
}

static void close_connection(struct connection *c) {
    if (c->events_left > 0) leave_paced(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void accept_from(const struct listener *listener) {
    int fd = accept(listener->fd, NULL, NULL);
    if (fd < 0) return;
    make_prompt(fd);
    struct connection *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->role = listener->role;
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
}

static enum role role_named(const char *name) {
    if (strcmp(name, "mixed") == 0) return MIXED;
    if (strcmp(name, "prefill") == 0) return PREFILL;
    if (strcmp(name, "decode") == 0) return DECODE;
    die("worker: %s is no role; roles are mixed, prefill and decode", name);
    return MIXED;
}

static int listen_at_free_port(int *fd) {
    struct sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(*fd, (struct sockaddr *)&address, size) || listen(*fd, 1024)) die("worker: cannot listen: %m");
    getsockname(*fd, (struct sockaddr *)&address, &size);
    return ntohs(address.sin_port);
}

int main(int argc, char **argv) {
    if (argc < 2) die("usage: worker ROLE...");
    signal(SIGPIPE, SIG_IGN);
    event_chunk_size = snprintf(event_chunk, sizeof event_chunk, "%zx\r\n%s\r\n", strlen(EVENT), EVENT);
    epoll = epoll_create1(0);
    int count = argc - 1;
    struct listener listeners[count];
    for (int i = 0; i < count; i++) {
        listeners[i].role = role_named(argv[i + 1]);
        printf("%d ", listen_at_free_port(&listeners[i].fd));
        epoll_ctl(epoll, EPOLL_CTL_ADD, listeners[i].fd, &(struct epoll_event){EPOLLIN, {.ptr = &listeners[i]}});
    }
    putchar('\n');
    fflush(stdout);
    struct epoll_event ready[MOST_READY];
    for (;;) {
        int found = wait_until(epoll, ready, MOST_READY, send_due());
        for (int i = 0; i < found; i++) {
            void *entry = ready[i].data.ptr;
            if (entry >= (void *)listeners && entry < (void *)(listeners + count)) {
                accept_from(entry);
                continue;
            }
            struct connection *c = entry;
            bool alive = !(ready[i].events & EPOLLOUT) || put_kept(c);
            if (alive && (ready[i].events & ~EPOLLOUT)) alive = receive(c);
            if (!alive) close_connection(c);
        }
    }
}
