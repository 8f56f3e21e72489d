/* Functions of the mock worker and the load generator: time, errors, growing buffers, sockets. */
#ifndef COMMON_H
#define COMMON_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL
#define NS_PER_MS 1000000LL

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

static inline void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

/* Returns items with space for at least `count` of them. */
static inline void *grown(void *items, size_t *capacity, size_t count, size_t item_size) {
    if (count <= *capacity) return items;
    while (*capacity < count) *capacity = *capacity ? 2 * *capacity : 4096;
    items = realloc(items, *capacity * item_size);
    if (!items) die("out of memory");
    return items;
}

static inline struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* Makes a socket nonblocking, and sends small packets at once (TCP_NODELAY). */
static inline void make_prompt(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

/* Sleeps until something is ready or `until` is reached (in now_ns() time; negative: no limit). */
static inline int wait_until(int epoll, struct epoll_event *ready, int most, int64_t until) {
    if (until < 0) return epoll_wait(epoll, ready, most, -1);
    int64_t left = until - now_ns();
    if (left < 0) left = 0;
    struct timespec timeout = {left / NS_PER_S, left % NS_PER_S};
    return epoll_pwait2(epoll, ready, most, &timeout, NULL);
}

#endif
