/* Load generator: keeps one request running on each of --connections keep-alive connections for --seconds, then waits
 * for the answers that have not ended, and prints its counts and times as one JSON object.
 *
 *     load --ports 8000,8001 --connections 32 --seconds 5 --body FILE [--events 257] [--stagger-ms 20]
 *
 * --events is the number of server-sent events that an answer must have (0: it is not a stream). Anything but a whole
 * 200 answer with that many events is an error; its connection is opened again. --stagger-ms spreads the first requests
 * over that time, so that paced streams do not run in step. If the body contains 16 times '#', each request has a number
 * there that no other one has.
 */
#include "common.h"

#include <getopt.h>

#define READ_SIZE (256 << 10)
#define MOST_READY 512
#define MOST_PORTS 64
#define MARKER "################"
#define MOST_HEAD 16384
#define MOST_ERRORS 1000
#define PATIENCE (10 * NS_PER_S)

enum part { HEAD, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, LAST_LINE };

struct connection {
    int fd, port;
    int64_t starts; /* when the first request is sent */
    bool busy;
    char *request;
    size_t sent;
    enum part part;
    char head[MOST_HEAD];
    size_t head_size, left; /* received bytes of the head; missing bytes of the body or chunk */
    char previous;          /* the last byte of the stream before the received bytes */
    int events;
    int64_t asked, last_event;
};

struct series {
    uint32_t *values; /* microseconds */
    size_t count, capacity;
};

static struct {
    int ports[MOST_PORTS], port_count, connections, events;
    double seconds;
    int64_t stagger;
} options = {.connections = 1, .seconds = 1};

static int epoll;
static char *request;
static size_t request_size, marker; /* position of the request's number; 0: it has none */
static long number;
static int64_t deadline;
static struct series latency, first_event, gap, stall;
static long answers, answers_in_time, events, events_in_time, errors;
static int running;

static void add(struct series *s, int64_t ns) {
    s->values = grown(s->values, &s->capacity, s->count + 1, sizeof *s->values);
    s->values[s->count++] = ns / 1000;
}

static void open_connection(struct connection *c) {
    struct sockaddr_in address = loopback(c->port);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("load: cannot connect to port %d: %m", c->port);
    make_prompt(c->fd);
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
    c->busy = false;
}

static void fail(struct connection *c, const char *why) {
    if (errors++ == 0) fprintf(stderr, "load: port %d: %s\n", c->port, why);
    if (errors == MOST_ERRORS) die("load: gave up after %d errors", MOST_ERRORS);
    if (c->busy) running--;
    close(c->fd);
    open_connection(c);
}

/* Sends as much as the socket accepts; a large body needs several calls. */
static bool send_more(struct connection *c) {
    ssize_t sent = send(c->fd, c->request + c->sent, request_size - c->sent, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    bool was_partial = c->sent > 0;
    if (sent > 0) c->sent += sent;
    bool is_partial = c->sent < request_size;
    if (is_partial != was_partial)
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd,
                  &(struct epoll_event){is_partial ? EPOLLIN | EPOLLOUT : EPOLLIN, {.ptr = c}});
    return true;
}

static void ask(struct connection *c) {
    int64_t now = now_ns();
    if (now >= deadline) return;
    c->busy = true;
    running++;
    c->asked = now;
    c->sent = c->head_size = c->events = 0;
    c->part = HEAD;
    if (!c->request) {
        c->request = request;
        if (marker) c->request = memcpy(malloc(request_size), request, request_size);
    }
    if (marker) {
        char digits[sizeof MARKER];
        snprintf(digits, sizeof digits, "%016lx", (now_ns() << 16) + number++);
        memcpy(c->request + marker, digits, sizeof MARKER - 1);
    }
    if (!send_more(c)) fail(c, "the connection was lost while sending");
}

static void note_events(struct connection *c, const char *data, size_t size, int64_t now) {
    const char *end = data + size;
    for (const char *at = data; (at = memchr(at, '\n', end - at)); at++) {
        if ((at > data ? at[-1] : c->previous) != '\n') continue;
        add(c->events == 0 ? &first_event : &gap, now - (c->events == 0 ? c->asked : c->last_event));
        c->last_event = now;
        c->events++;
        events++;
        events_in_time += now <= deadline;
    }
    c->previous = end[-1];
}

static const char *end_answer(struct connection *c, int64_t now) {
    if (c->events != options.events) return "an answer had another number of events than asked for";
    add(&latency, now - c->asked);
    if (options.events) add(&stall, now - c->last_event);
    answers++;
    answers_in_time += now <= deadline;
    running--;
    c->busy = false;
    return NULL;
}

static const char *read_head(struct connection *c) {
    c->head[c->head_size] = 0;
    if (strncmp(c->head, "HTTP/1.1 200", 12) != 0) {
        static char why[80];
        snprintf(why, sizeof why, "answered '%.40s'", c->head);
        return why;
    }
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->part = length ? BODY : CHUNK_SIZE;
    c->left = length ? strtoul(length + 17, NULL, 10) : 0;
    c->previous = 0;
    if (!length && !strcasestr(c->head, "\r\ntransfer-encoding: chunked")) return "an answer had no length";
    return NULL;
}

/* Processes received bytes; returns a description of an error in them, or NULL. */
static const char *take(struct connection *c, const char *data, size_t size, int64_t now) {
    const char *why = NULL, *end = data + size;
    while (data < end && !why) {
        if (!c->busy) return "more came than the answer";
        size_t some = end - data;
        switch (c->part) {
        case HEAD:
            if (c->head_size + 1 >= MOST_HEAD) return "the head of an answer is too long";
            c->head[c->head_size++] = *data++;
            if (c->head_size >= 4 && memcmp(c->head + c->head_size - 4, "\r\n\r\n", 4) == 0) why = read_head(c);
            break;
        case BODY:
        case CHUNK_DATA:
            if (some > c->left) some = c->left;
            if (options.events) note_events(c, data, some, now);
            data += some;
            c->left -= some;
            if (c->left == 0 && c->part == BODY) why = end_answer(c, now);
            if (c->left == 0 && c->part == CHUNK_DATA) c->part = CHUNK_END;
            break;
        case CHUNK_END:
            if (*data++ == '\n') c->part = CHUNK_SIZE, c->left = 0;
            break;
        case CHUNK_SIZE:
            if (*data == '\n')
                c->part = c->left ? CHUNK_DATA : LAST_LINE;
            else if (*data != '\r')
                c->left = c->left * 16 + (*data <= '9' ? *data - '0' : (*data | 32) - 'a' + 10);
            data++;
            break;
        case LAST_LINE:
            if (*data++ == '\n') why = end_answer(c, now);
            break;
        }
    }
    return why;
}

static void receive(struct connection *c) {
    static char data[READ_SIZE];
    ssize_t size = recv(c->fd, data, sizeof data, 0);
    if (size < 0 && errno == EAGAIN) return;
    const char *why = size > 0 ? take(c, data, size, now_ns()) : "the connection was closed";
    if (why) fail(c, why);
    if (!c->busy) ask(c);
}

static void run(void) {
    struct connection *all = calloc(options.connections, sizeof *all);
    for (int i = 0; i < options.connections; i++) {
        all[i].port = options.ports[i % options.port_count];
        open_connection(&all[i]);
    }
    int64_t start = now_ns();
    deadline = start + options.seconds * NS_PER_S;
    for (int i = 0; i < options.connections; i++) all[i].starts = start + options.stagger * i / options.connections;
    int waiting = 0; /* the first connection that has not started */
    struct epoll_event ready[MOST_READY];
    for (;;) {
        int64_t now = now_ns();
        while (waiting < options.connections && all[waiting].starts <= now) ask(&all[waiting++]);
        if (now >= deadline && running == 0) return;
        if (now >= deadline + PATIENCE) {
            fprintf(stderr, "load: %d answers never ended\n", running);
            errors += running;
            return;
        }
        int64_t until = now < deadline ? deadline : deadline + PATIENCE;
        if (waiting < options.connections) until = all[waiting].starts;
        int found = wait_until(epoll, ready, MOST_READY, until);
        for (int i = 0; i < found; i++) {
            struct connection *c = ready[i].data.ptr;
            if ((ready[i].events & EPOLLOUT) && !send_more(c)) fail(c, "the connection was lost while sending");
            if (ready[i].events & ~EPOLLOUT) receive(c);
        }
    }
}

static void read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die("load: cannot read %s: %m", path);
    fseek(file, 0, SEEK_END);
    size_t size = ftell(file);
    rewind(file);
    request = malloc(size + 512);
    request_size = sprintf(request,
                           "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                           "content-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                           size);
    if (fread(request + request_size, 1, size, file) != size) die("load: cannot read %s", path);
    request_size += size;
    fclose(file);
    char *found = memmem(request, request_size, MARKER, sizeof MARKER - 1);
    if (found) marker = found - request;
}

static void read_options(int argc, char **argv) {
    static const struct option known[] = {
        {"ports", required_argument, NULL, 'p'},   {"connections", required_argument, NULL, 'c'},
        {"seconds", required_argument, NULL, 's'}, {"body", required_argument, NULL, 'b'},
        {"events", required_argument, NULL, 'e'},  {"stagger-ms", required_argument, NULL, 'g'},
        {NULL, 0, NULL, 0}};
    for (int name; (name = getopt_long(argc, argv, "", known, NULL)) != -1;) switch (name) {
        case 'p':
            for (char *port = strtok(optarg, ","); port && options.port_count < MOST_PORTS; port = strtok(NULL, ","))
                options.ports[options.port_count++] = atoi(port);
            break;
        case 'c': options.connections = atoi(optarg); break;
        case 's': options.seconds = atof(optarg); break;
        case 'b': read_request(optarg); break;
        case 'e': options.events = atoi(optarg); break;
        case 'g': options.stagger = atof(optarg) * NS_PER_MS; break;
        default: exit(1);
        }
    if (!options.port_count || !request) die("load: --ports and --body are needed");
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_series(const char *name, struct series *s) {
    if (s->count == 0) return;
    qsort(s->values, s->count, sizeof *s->values, compare);
    printf(", \"%s_p50_us\": %u, \"%s_p99_us\": %u", name, s->values[s->count / 2], name, s->values[s->count * 99 / 100]);
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    epoll = epoll_create1(0);
    run();
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"answers\": %ld, \"per_s\": %.1f, \"events\": %ld, \"events_per_s\": %.1f, \"errors\": %ld, \"cpu_s\": %.4f",
           answers, answers_in_time / options.seconds, events, events_in_time / options.seconds, errors, cpu);
    print_series("latency", &latency);
    print_series("first_event", &first_event);
    print_series("gap", &gap);
    print_series("stall", &stall);
    printf("}\n");
}
